"""Style of the page, in light and dark; exported plots embed the same style."""

STYLE = """
:root{--ground:#f7f8fa;--paper:#fff;--ink:#1b2330;--soft:#667085;--rule:#e4e7ec;--c1:#3563e9;--c2:#f59e0b;--c3:#10a37f;
--c4:#a855f7;--lost:#e5484d;color-scheme:light dark}
@media(prefers-color-scheme:dark){:root{--ground:#0f141b;--paper:#171e28;--ink:#e6eaf0;--soft:#94a0b3;--rule:#2a3341;
--c1:#6f9bff;--c2:#fbbf24;--c3:#34d399;--c4:#c084fc;--lost:#ff7b80}}
*{box-sizing:border-box}
body{margin:0;background:var(--ground);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1180px;margin:0 auto;padding:32px 20px 64px}
h1{font-size:26px;margin:0;letter-spacing:-.01em;overflow-wrap:anywhere}
h2{font-size:17px;margin:40px 0 12px}
h3{font-size:14px;margin:18px 0 6px;color:var(--soft);font-weight:600}
header p{color:var(--soft);margin:4px 0 20px}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px}
.card{background:var(--paper);border:1px solid var(--rule);border-radius:10px;padding:12px 14px;display:flex;
flex-direction:column}
.card span,.card small{color:var(--soft);font-size:12.5px}
.card b{font-size:22px;font-weight:650;font-variant-numeric:tabular-nums;letter-spacing:-.01em}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(460px,100%),1fr));gap:14px}
figure{background:var(--paper);border:1px solid var(--rule);border-radius:10px;margin:0;padding:12px 12px 6px}
figcaption{font-weight:600;font-size:13.5px;margin:0 4px 6px}
svg{display:block;width:100%;height:auto}
svg .grid{stroke:var(--rule);stroke-width:1}
svg .axis{stroke:var(--soft);stroke-width:1}
svg .tick{fill:var(--soft);font:11px system-ui,sans-serif}
svg path{fill:none;stroke-linejoin:round;stroke-linecap:round}
svg .line{stroke:var(--c1);stroke-width:2}
svg .raw{stroke:var(--c1);stroke-width:1;opacity:.28}
svg .lost{stroke:var(--lost);stroke-width:1.4;stroke-dasharray:3 4}
svg .restart{stroke:var(--lost);stroke-width:1;stroke-dasharray:2 3;opacity:.7}
svg .dot{fill:var(--c1);stroke:none;opacity:1}
svg .dot.outside,svg .dot.lost{fill:var(--lost)}
svg .spot{fill:transparent}
svg .spot:hover{fill:var(--c1)}
.legend{display:flex;flex-wrap:wrap;gap:6px 20px;color:var(--soft);font-size:13px;margin:0 0 10px}
.legend i{display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:7px}
.scroll{overflow-x:auto;background:var(--paper);border:1px solid var(--rule);border-radius:10px}
table{border-collapse:collapse;width:100%;font-size:13.5px}
th,td{text-align:left;padding:7px 14px;border-top:1px solid var(--rule);vertical-align:top;overflow-wrap:anywhere}
thead th{border-top:0;color:var(--soft);font-weight:600;font-size:12.5px}
tbody:first-child tr:first-child td{border-top:0}
td{font-variant-numeric:tabular-nums}
.right{text-align:right}
.right,.short{white-space:nowrap;overflow-wrap:normal}
pre{background:var(--paper);border:1px solid var(--rule);border-radius:10px;padding:12px 14px;overflow-x:auto;
font-size:13px}
details{margin-top:10px}
summary{cursor:pointer;color:var(--soft);font-size:13.5px;margin-bottom:8px}
footer{color:var(--soft);font-size:12.5px;margin-top:40px}
"""
