#!/usr/bin/env bash
# Debian 12's Python for arm64 and ONNX Runtime's wheel for it, in a folder: bundles are judged there under qemu-user.
#
#     apt-get install qemu-user
#     scripts/aarch64.sh FOLDER
#     QATKIT_AARCH64=FOLDER uv run pytest -m slow tests/light/test_aarch64.py
#
# Nothing of this machine changes: packages are downloaded and unpacked, FOLDER/root and FOLDER/site are what is used.
# ONNX Runtime 1.31 ends in a segmentation fault under qemu 7.2, where it asks for the processor's caches.
set -euo pipefail
folder=$(realpath -m "${1:?FOLDER}")
onnxruntime=${2:-1.23.2}
packages=(
  libc6 libgcc-s1 libstdc++6 zlib1g libexpat1 libffi8 libssl3 libbz2-1.0 liblzma5 libuuid1 libcrypt1 libsqlite3-0
  libncursesw6 libtinfo6 libreadline8 python3.11-minimal libpython3.11-minimal libpython3.11-stdlib
)
mkdir -p "$folder"/{state,cache,debs,root}
: >"$folder/status"
apt=(
  apt-get -qq -o "Dir::State=$folder/state" -o "Dir::State::status=$folder/status" -o "Dir::Cache=$folder/cache"
  -o APT::Architecture=arm64 -o APT::Architectures::=arm64 -o APT::Sandbox::User=root
)
"${apt[@]}" update
(cd "$folder/debs" && "${apt[@]}" download "${packages[@]}")
for package in "$folder"/debs/*.deb; do
  dpkg-deb -x "$package" "$folder/root"
done
# From there, since in this checkout its pinned versions would hold.
(cd "$folder" && uv pip install --quiet --target site --python-platform aarch64-manylinux_2_28 --python-version 3.11 \
  --only-binary :all: "onnxruntime==$onnxruntime" numpy)
qemu-aarch64 -L "$folder/root" -E "PYTHONPATH=$folder/site" "$folder/root/usr/bin/python3.11" -c \
  'import platform, onnxruntime; print("onnxruntime", onnxruntime.__version__, platform.machine())'
