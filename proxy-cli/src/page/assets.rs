//! The files of the page, embedded unchanged from the source: no build step, and no requests to other servers.

/// The HTML of the page.
pub(super) const INDEX: &str = include_str!("assets/index.html");

const SCRIPT: &str = "text/javascript; charset=utf-8";

/// The other files of the page: name, content type, text.
pub(super) const FILES: [(&str, &str, &str); 9] = [
    ("chart.js", SCRIPT, include_str!("assets/chart.js")),
    ("detail.js", SCRIPT, include_str!("assets/detail.js")),
    ("dom.js", SCRIPT, include_str!("assets/dom.js")),
    ("icon.svg", "image/svg+xml", include_str!("assets/icon.svg")),
    ("main.js", SCRIPT, include_str!("assets/main.js")),
    ("map.js", SCRIPT, include_str!("assets/map.js")),
    ("merge.js", SCRIPT, include_str!("assets/merge.js")),
    ("style.css", "text/css; charset=utf-8", include_str!("assets/style.css")),
    ("tables.js", SCRIPT, include_str!("assets/tables.js")),
];
