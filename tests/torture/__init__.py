"""Attacks on a run, a recording and a page. A small part runs with the tests, all of it by ``make torture``."""
