"""Purify image files: one image, folders, globs, npz arrays and tar archives, of any size, keeping what they are.

Names, formats, greyscale, transparency and colour profiles are kept, and the EXIF orientation is applied to the pixels.
A file that cannot be read is reported at the end with its reason and stops nothing. An output is written beside its
place and renamed, so that a killed run leaves whole files only, and the next run skips what is there. Nothing is
written outside the output folder, which records the settings it was made with.

    names → sources (files, tar members) → pictures → tiles → pictures          one image file for each image file
    names → arrays (npz)                 →            tiles → arrays            one npz file for each npz file
"""

from diffpure.files.pictures import Picture, encode, read_picture
from diffpure.files.purify import purify_files
from diffpure.files.report import Report
from diffpure.files.sources import Item
from diffpure.files.tiles import Fit, purify_images

__all__ = ["Fit", "Item", "Picture", "Report", "encode", "purify_files", "purify_images", "read_picture"]
