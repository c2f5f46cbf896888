"""Encrypts files with weights or data on disk: `export.encrypt=KEYFILE`.

    cipher     encrypts and decrypts one file with AES-256-GCM in chunks, and reads and writes key files
    memory     keeps temporary files in memory, in a folder that is removed when the job's process ends for any reason
    guard      is a separate process that removes this folder if the job's process was killed
    sealed     detects damaged checkpoints
    vault      is the interface: `protected` around a job, `secret` to write a file, `readable` to read one
    command    makes a key, or decrypts a file

Without a key, `secret` writes the file atomically (`qatkit_verify.files.whole`), and `readable` yields the path itself.
Nothing here needs torch, and `cryptography` is imported only if there is a key.
"""
