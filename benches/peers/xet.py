"""Stores files with hf-xet in a folder: its real chunking, deduplication and compression, without its server.

    xet.py STORE PATH    PATH is a file or a folder; HF_XET_CACHE says where hf-xet keeps its cache
"""

import sys
from pathlib import Path

import hf_xet


def main():
    store, path = Path(sys.argv[1]), Path(sys.argv[2])
    commit = hf_xet.XetSession().new_upload_commit(endpoint=f"local://{store.resolve()}")
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        commit.start_upload_file(str(file))
    commit.wait_to_finish()


if __name__ == "__main__":
    main()
