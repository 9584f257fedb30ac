"""What each model family writes when it thinks and when it calls a tool: one table for a family.

`format` has the parts that tables are made of, `shapes` what several families share. The tables are in `json_like`,
`xml_like`, `python_like` and `channels`; `registry` lists them in the order in which they are tried.
`response_template` makes a table from a checkpoint's own description, `rendering` writes past calls by a table.
"""
