"""One self-contained HTML page that explains plans; `memopt.report.page.document` makes it."""
