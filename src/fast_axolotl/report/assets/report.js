// Draws the charts from the data in the page; asks nothing of the network.
(() => {
  "use strict";

  const root = document.documentElement;
  const byId = (id) => document.getElementById(id);
  const data = JSON.parse(byId("report-data").textContent);
  const figures = JSON.parse(byId("report-figures").textContent);
  const prefersDark = matchMedia("(prefers-color-scheme: dark)");
  let before = null; // what the page was like before it was printed
  const isTouch = matchMedia("(pointer: coarse)").matches;

  // --- from the page's own form to Plotly's ---

  function column({ ref, by }) {
    const values = ref.split("/").reduce((node, key) => node[key], data);
    return by ? values.map((value) => (value === null ? null : value * by)) : values;
  }

  // A colour of the style sheet: rgb(1, 2, 3).
  const probe = document.body.appendChild(document.createElement("i"));
  function ink(role) {
    probe.style.color = `var(--${role})`;
    return getComputedStyle(probe).color;
  }

  function paint({ role, alpha }) {
    return alpha === undefined ? ink(role) : ink(role).replace(")", `, ${alpha})`).replace("rgb", "rgba");
  }

  function fill(value) {
    if (Array.isArray(value)) return value.map(fill);
    if (value === null || typeof value !== "object") return value;
    if ("ref" in value) return column(value);
    if ("role" in value) return paint(value);
    return Object.fromEntries(Object.entries(value).map(([key, one]) => [key, fill(one)]));
  }

  function layoutOf(figure, width, height) {
    const own = fill(figure.layout);
    const layout = {
      width,
      height,
      margin: { l: 62, r: figure.right || 14, t: 22, b: 46 },
      paper_bgcolor: ink("card"),
      plot_bgcolor: ink("card"),
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: ink("ink") },
      hovermode: "x unified",
      hoversubplots: "axis",
      hoverlabel: { bgcolor: ink("card"), bordercolor: ink("line"), font: { color: ink("ink") } },
      showlegend: false,
      dragmode: isTouch ? false : "zoom",
      modebar: { bgcolor: "rgba(0,0,0,0)", color: ink("muted"), activecolor: ink("accent") },
      ...own,
    };
    for (const name of Object.keys(own).filter((key) => /^[xy]axis\d*$/.test(key))) {
      layout[name] = {
        gridcolor: ink("grid"),
        linecolor: ink("line"),
        zeroline: false,
        separatethousands: true,
        showgrid: name[0] === "y",
        ticks: name[0] === "x" ? "outside" : "",
        tickcolor: ink("line"),
        tickfont: { color: ink("muted"), size: 11 },
        fixedrange: name[0] === "y" || isTouch,
        nticks: name[0] === "y" ? 6 : undefined,
        showspikes: name[0] === "x",
        spikecolor: ink("muted"),
        spikethickness: 1,
        spikedash: "dot",
        ...own[name],
        title: {
          font: { color: ink("muted"), size: 11 },
          standoff: name[0] === "x" ? 6 : 10,
          ...own[name].title,
        },
      };
    }
    return layout;
  }

  const config = {
    displaylogo: false,
    displayModeBar: !isTouch,
    modeBarButtons: [["zoomIn2d", "zoomOut2d", "resetScale2d", "toImage"]],
    toImageButtonOptions: { format: "png", scale: 2 },
  };

  function draw() {
    if (!window.Plotly) return;
    for (const [id, figure] of Object.entries(figures)) {
      const place = byId(id);
      if (!place.clientWidth) continue;
      const height = Math.round(figure.height * (before ? 0.7 : 1));
      place.style.height = `${height}px`;
      const layout = layoutOf(figure, place.clientWidth, height);
      window.Plotly.react(place, fill(figure.traces), layout, config);
    }
  }

  // --- keys of a chart: + and - zoom, arrows move, 0 shows all ---

  function move(place, key) {
    const axis = place.layout && place.layout.xaxis;
    if (!axis || !axis.range) return false;
    const [low, high] = axis.range.map(Number);
    const length = high - low;
    const moves = {
      "+": [length / 6, -length / 6],
      "=": [length / 6, -length / 6],
      "-": [-length / 4, length / 4],
      ArrowLeft: [-length / 10, -length / 10],
      ArrowRight: [length / 10, length / 10],
    };
    if (key === "0" || key === "Home") {
      window.Plotly.relayout(place, { "xaxis.range": figures[place.id].layout.xaxis.range,
        "xaxis.autorange": !figures[place.id].layout.xaxis.range });
      return true;
    }
    if (!moves[key]) return false;
    window.Plotly.relayout(place, { "xaxis.range": [low + moves[key][0], high + moves[key][1]] });
    return true;
  }

  for (const id of Object.keys(figures)) {
    byId(id).addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (move(event.currentTarget, event.key)) event.preventDefault();
    });
  }

  // --- light and dark ---

  const toggle = byId("theme");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : prefersDark.matches);

  function nameToggle() {
    toggle.textContent = isDark() ? "Light" : "Dark";
  }

  toggle.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    nameToggle();
    draw();
  });
  prefersDark.addEventListener("change", () => {
    nameToggle();
    draw();
  });

  // --- paper: light, narrow, everything unfolded ---

  addEventListener("beforeprint", () => {
    if (before) return;
    const folded = [...document.querySelectorAll("details:not([open])")];
    before = { theme: root.dataset.theme, folded };
    folded.forEach((one) => { one.open = true; });
    root.dataset.theme = "light";
    root.dataset.printing = "";
    draw();
  });
  addEventListener("afterprint", () => {
    if (!before) return;
    before.folded.forEach((one) => { one.open = false; });
    if (before.theme) root.dataset.theme = before.theme;
    else delete root.dataset.theme;
    delete root.dataset.printing;
    before = null;
    draw();
  });

  // --- a run that goes on: load the page again, as it was left ---

  const seconds = Number(root.dataset.reload);
  const sections = [...document.querySelectorAll("details")];
  let left = {};
  try {  // a sandboxed frame has no storage
    left = JSON.parse(sessionStorage.getItem(location.pathname) || "{}");
    sessionStorage.removeItem(location.pathname);
  } catch {}
  if (left.theme) root.dataset.theme = left.theme;
  (left.open || []).forEach((isOpen, place) => { if (sections[place]) sections[place].open = isOpen; });
  if (left.scroll) scrollTo(0, left.scroll);

  function reload() {
    const open = sections.map((one) => one.open);
    const now = { theme: root.dataset.theme, open, scroll: scrollY };
    try { sessionStorage.setItem(location.pathname, JSON.stringify(now)); } catch {}
    location.reload();
  }

  // --- start ---

  async function unpack() {
    const packed = byId("report-plotly");
    if (!packed.textContent) return;
    const bytes = Uint8Array.from(atob(packed.textContent.trim()), (one) => one.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.head.append(script);
    packed.remove();
  }

  function refuse(error) {
    for (const id of Object.keys(figures)) {
      byId(id).textContent = "This browser is too old to draw the chart; its text is below.";
    }
    console.error(error);
  }

  byId("download").href = URL.createObjectURL(
    new Blob([byId("report-data").textContent], { type: "application/json" }),
  );
  let waiting = 0;
  addEventListener("resize", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => { if (!before) draw(); }, 120);
  });
  nameToggle();
  unpack().then(draw).catch(refuse).finally(() => {
    root.dataset.drawn = "";
    if (seconds) setInterval(() => { if (!document.hidden) reload(); }, 1000 * seconds);
  });
})();
