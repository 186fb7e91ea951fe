"""peakattn report: everything that was recorded, in one HTML file that needs no network, or in Markdown.

``build`` reads the records and writes the document, ``parts`` are what a section is made of, ``sections`` and
``kernels`` are the sections.
"""
