"""Files that hold weights or data, encrypted on disk: `export.encrypt=KEYFILE`.

    cipher     one file: AES-256-GCM in chunks, and the key file
    memory     temporary files in memory, in a folder that is removed with its process, however that ends
    guard      the process that removes the folder if this process can't
    vault      the interface: `protected` around a job, `secret` to write a file, `readable` to read one
    command    makes a key, or decrypts a file

Without a key `secret` is `files.whole` and `readable` gives the path itself. Nothing here needs torch, and
`cryptography` is imported only if there is a key.
"""
