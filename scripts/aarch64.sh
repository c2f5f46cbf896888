#!/usr/bin/env bash
# Puts Debian 12's Python for arm64 and its wheel of ONNX Runtime into a folder, to check bundles under qemu-user.
#
#     apt-get install qemu-user
#     scripts/aarch64.sh FOLDER
#     QATKIT_AARCH64=FOLDER uv run pytest -m slow tests/light/test_aarch64.py
#
# Nothing on this machine changes: packages are only downloaded and unpacked; FOLDER/root and FOLDER/site are used.
# ONNX Runtime 1.31 crashes with a segmentation fault under qemu 7.2 when it reads the sizes of the processor's caches.
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
# Run from there, since the pinned versions of this checkout would apply here.
(cd "$folder" && uv pip install --quiet --target site --python-platform aarch64-manylinux_2_28 --python-version 3.11 \
  --only-binary :all: "onnxruntime==$onnxruntime" numpy)
qemu-aarch64 -L "$folder/root" -E "PYTHONPATH=$folder/site" "$folder/root/usr/bin/python3.11" -c \
  'import platform, onnxruntime; print("onnxruntime", onnxruntime.__version__, platform.machine())'
