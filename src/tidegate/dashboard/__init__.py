"""The dashboard: roots shown in a browser, by a process of its own that only reads them.

values.py      what it answers, as values
root.py        a root as it is shown: what was read of it, kept for a while (kept.py); moments.py: times in it
attempts.py    every checkpoint that was taken or tried; phases.py: of one of them; comparing.py: two of them
tables.py      which checkpoint each table shows; alerts.py: what somebody should look at
actions.py     what a run can be asked for from here
routes.py      what is under which address; openapi.py: the same as a document; server.py: how it is served
guard.py       who may ask for what; token.py: by which secret; page.py: the files of the page
"""
