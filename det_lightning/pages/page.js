// Draws the charts of a page in the colours of its style, again when these change. Each chart is a function of `color`.
const charts = new Map();
function draw(id) {
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const [traces, {xaxis, yaxis, ...layout}] = charts.get(id)(color);
  const axis = {gridcolor: color("line"), linecolor: color("soft"), zeroline: false, automargin: true, exponentformat: "power"};
  const colors = {paper_bgcolor: "transparent", plot_bgcolor: "transparent", font: {color: color("soft")}};
  const around = {margin: {t: 20, r: 20, b: 45, l: 50}, hovermode: "closest", hoverlabel: {namelength: -1}, showlegend: false};
  Plotly.react(id, traces, {...colors, ...around, xaxis: {...axis, ...xaxis}, yaxis: {...axis, ...yaxis}, ...layout},
    {responsive: true, displayModeBar: false});
}
function show(id, make) {
  charts.set(id, make);
  draw(id);
}
for (const query of ["print", "(prefers-color-scheme: dark)"]) {
  matchMedia(query).addEventListener("change", () => [...charts.keys()].forEach(draw));
}
// Plotly reads some HTML in texts; names must not be read so.
const plain = (text) => String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;");
const titled = (text, more) => ({title: {text: plain(text)}, ...more});
const curve = (name, [x, y], line) => ({name: plain(name), x, y, line, mode: x.length > 24 ? "lines" : "lines+markers"});
