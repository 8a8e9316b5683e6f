"""The study: does filtering help, on which data, for which users and items, and how certainly?

`runs` trains one model and writes its record; `suite` lists the runs and works through them; `report` turns the
records, and nothing else, into tables and figures. `strata` and `compare` hold the definitions and the statistics.
"""
