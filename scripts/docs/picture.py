"""Takes a picture of a report's page with headless Chromium or Chrome.

python scripts/docs/picture.py out/report/report.html docs/assets/report.png
"""

import argparse
import shutil
import subprocess
import tempfile
from pathlib import Path

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path, help="report.html, or another page")
    parser.add_argument("picture", type=Path, help="the PNG to write")
    parser.add_argument("--width", type=int, default=1180, help="of the window, in pixels")
    parser.add_argument("--height", type=int, default=1000, help="of the window: what is below it is left out")
    parser.add_argument("--scale", type=float, default=1.5, help="pixels of the picture for one of the window")
    options = parser.parse_args()
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        parser.error(f"none of {', '.join(BROWSERS)} is installed")
    if not options.page.is_file():
        parser.error(f"{options.page}: no such file")
    picture = options.picture.resolve()
    with tempfile.TemporaryDirectory() as profile:
        line = [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        line += [f"--user-data-dir={profile}", f"--force-device-scale-factor={options.scale:g}"]
        line += [f"--window-size={options.width},{options.height}", f"--screenshot={picture}"]
        subprocess.run([*line, options.page.resolve().as_uri()], check=True, timeout=120, stderr=subprocess.DEVNULL)
    print(picture)


if __name__ == "__main__":
    main()
