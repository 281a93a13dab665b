"""train.py on a disk that refuses files above 600 KiB, as a full one does (with another error number)."""

import resource

import train

resource.setrlimit(resource.RLIMIT_FSIZE, (600 * 1024, 600 * 1024))
train.main()
