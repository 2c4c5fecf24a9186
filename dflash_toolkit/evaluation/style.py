"""The style sheet of the report page. Its series colours are told apart in light and in dark."""

CSS = """
:root {
  color-scheme: light dark;
  --page: #f6f7f9; --card: #ffffff; --text: #1b1f27; --soft: #5d6675; --rule: #e3e6eb;
  --c0: #2f6bde; --c1: #d9730d; --c2: #16877a; --c3: #a23fb8;
  --c4: #c2325b; --c5: #6a7b13; --c6: #7a5c3e; --c7: #5b6bb5;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #12151a; --card: #1b2027; --text: #e8ebf0; --soft: #9aa4b2; --rule: #2d343e;
    --c0: #79a8ff; --c1: #f5a44f; --c2: #4fcdbd; --c3: #d98cec;
    --c4: #ff85a4; --c5: #b9cc5a; --c6: #cfab85; --c7: #a5b2f0;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--text);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif;
}
main { max-width: 1120px; margin: 0 auto; padding: 40px 24px 64px; }
h1 { font-size: 27px; line-height: 1.2; margin: 0 0 6px; letter-spacing: -.01em; }
h2 { font-size: 18px; margin: 40px 0 12px; }
h3 { font-size: 15px; margin: 0 0 10px; }
p { margin: 0 0 8px; }
.soft { color: var(--soft); }
.tiles, .charts { display: grid; gap: 14px; }
.tiles { grid-template-columns: repeat(auto-fit, minmax(190px, 1fr)); margin-top: 26px; }
.charts { grid-template-columns: repeat(auto-fit, minmax(min(440px, 100%), 1fr)); }
.charts + .card { margin-top: 14px; }
.card {
  background: var(--card); border: 1px solid var(--rule); border-radius: 10px;
  padding: 16px 18px; min-width: 0;
}
.tile b { display: block; font-size: 29px; line-height: 1.25; font-weight: 650; }
.tile span { display: block; color: var(--soft); font-size: 13px; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
.scroll + .scroll { margin-top: 14px; }
figure { margin: 0; }
svg { display: block; width: 100%; min-width: 400px; max-width: 640px; height: auto; }
svg text { font-size: 12px; fill: var(--soft); }
svg .label { font-size: 12.5px; }
svg .value { font-size: 12.5px; font-weight: 600; fill: var(--text); }
svg .grid { stroke: var(--rule); }
svg .axis { stroke: var(--soft); }
svg .line { fill: none; stroke: var(--c); stroke-width: 2.2; stroke-linejoin: round; }
svg .line.pooled { stroke-dasharray: 5 4; }
svg .dot { fill: var(--card); stroke: var(--c); stroke-width: 2; }
svg .bar { fill: var(--c); opacity: .88; }
svg .mean { stroke: var(--text); stroke-width: 1.3; stroke-dasharray: 4 4; }
.legend {
  display: flex; flex-wrap: wrap; gap: 4px 18px; list-style: none;
  margin: 0 0 12px; padding: 0; font-size: 13.5px;
}
.legend li::before {
  content: ""; display: inline-block; width: 14px; height: 4px; border-radius: 2px; background: var(--c);
  margin-right: 7px; vertical-align: middle;
}
table { border-collapse: collapse; width: 100%; font-size: 13.5px; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: 0 0 8px; }
th, td { padding: 6px 10px; border-bottom: 1px solid var(--rule); text-align: right; white-space: nowrap; }
th { font-weight: 600; }
thead th { color: var(--soft); font-size: 12.5px; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
tbody tr:last-child > * { border-bottom: 0; }
.words td { text-align: left; white-space: normal; overflow-wrap: anywhere; }
.words th { vertical-align: top; font-weight: 400; color: var(--soft); }
dt { font-weight: 600; }
dd { margin: 0 0 10px; color: var(--soft); max-width: 88ch; }
.c0 { --c: var(--c0); } .c1 { --c: var(--c1); } .c2 { --c: var(--c2); } .c3 { --c: var(--c3); }
.c4 { --c: var(--c4); } .c5 { --c: var(--c5); } .c6 { --c: var(--c6); } .c7 { --c: var(--c7); }
.pooled { --c: var(--text); }
@media print { body { background: #fff; } main { padding: 0; } .card { break-inside: avoid; } }
"""
