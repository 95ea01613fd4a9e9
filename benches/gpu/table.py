"""Table of the loads, beside the rate of bare copies: table.py BARE REPORT..."""

import datetime
import json
import os
import platform
import sys

GIB = 1 << 30


def main() -> None:
    bare = json.loads(sys.argv[1])
    rate = bare["bytes_per_second"]
    print(f"{bare['gpu']}, {os.cpu_count()} cores, Linux {platform.release()}, {datetime.date.today()}:")
    print(f"bare copies from pinned memory {rate / GIB:.2f} GiB/s\n")
    print("| weights | to | decoded on | s | GiB/s | of bare | wait s | copy s | first tensor s |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for path in sys.argv[2:]:
        with open(path) as file:
            report = json.load(file)
        times, size = report["times"], report["bytes"]
        reached = size / times["total"]
        of_bare = f"{reached / rate:.2f}" if report["compared"] else "-"
        decoded_on = "GPU" if report["decoded_on_device"] > size / 2 else "CPU"
        seconds = f"{times['wait']:.2f} | {times['copy']:.2f} | {times['first_tensor']:.2f}"
        figures = f"{decoded_on} | {times['total']:.2f} | {reached / GIB:.2f} | {of_bare} | {seconds}"
        print(f"| {report['name']}, {size / GIB:.1f} GiB | {report['device']} | {figures} |")


main()
