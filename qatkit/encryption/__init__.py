"""Files that hold weights or data, encrypted on the disk: `export.encrypt=KEYFILE`.

    cipher     one file: AES-256-GCM in chunks, and the key's own file
    memory     temporary files in memory, in a folder that goes with its process, whatever ends it
    guard      the process that removes it, where this one can't
    vault      what the rest calls: `protected` around a job, `secret` to write a file, `readable` to read one
    command    a key, and a file in the clear again

Without a key `secret` is `files.whole` and `readable` gives the path itself. No torch; `cryptography` is imported where
there is a key.
"""
