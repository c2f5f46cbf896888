"""What `qatkit-verify` asks of a bundle on this machine, a question a file. Each yields one `base.Found`."""
