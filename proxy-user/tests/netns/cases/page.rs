//! The page of the metrics server in a real browser: loading, updates, keys, a phone's width, colours.
//!
//! With `BALLAST_SCREENSHOTS` (`cargo xtask build docs --screenshots`), the case writes the pictures of docs/page.md to that folder.

use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use super::{Case, tcp};
use crate::agent::get;
use crate::browser::Browser;
use crate::fixture::{Fixture, SOON, Wish, eventually};
use crate::peer::{Attempt, Load, SocketKind};
use proxy_testbed::Family;
use proxy_testbed::manifest::{Port, Service, cluster_ip};

const fn http(pods: &'static [u8]) -> [Port; 1] {
    [Port { name: "http", is_tcp: true, number: 80, target: 8080, pods }]
}

const SHOP: Service = Service { name: "shop", number: 20, ports: &http(&[0, 1, 2]) };
const CART: Service = Service { name: "cart", number: 21, ports: &http(&[1, 3]) };
const SEARCH: Service = Service { name: "search", number: 22, ports: &http(&[2, 3]) };
const ORDERS: Service = Service { name: "orders", number: 23, ports: &[tcp(80, 9090, &[3])] };
const PAYMENTS: Service = Service { name: "payments", number: 24, ports: &http(&[]) };
const CACHE: Service = Service {
    name: "cache",
    number: 25,
    ports: &[Port { name: "gossip", is_tcp: false, number: 53, target: 5353, pods: &[0, 1] }],
};

#[rustfmt::skip]
const FLAGS: &[&str] = &[
    "--page", "all", "--page-history", "4m", "--metrics-bind-address", "127.0.0.1:10249",
    "--max-services", "64", "--max-frontends", "64", "--max-slots", "1024", "--max-backends", "256",
    "--max-flows", "16384", "--max-sockets", "4096",
];

const WISH: Wish = Wish { pods: 4, services: &[SHOP, CART, SEARCH, ORDERS, PAYMENTS, CACHE], flags: FLAGS };

pub const CASES: &[Case] = &[
    Case { name: "page::works_in_a_browser", wish: WISH, run: browse },
    Case { name: "page::shows_addresses_only_with_the_flag", wish: CLOSED, run: closed },
];

const CLOSED: Wish = Wish {
    pods: 1,
    services: &[Service { name: "shop", number: 20, ports: &http(&[0]) }, PAYMENTS],
    flags: &["--page", "services", "--page-history", "0", "--max-flows", "16384", "--max-sockets", "4096"],
};

const URL: &str = "http://127.0.0.1:10249/";

fn to(service: Service) -> Attempt {
    Attempt::new(SocketKind::Tcp, (cluster_ip(Family::V4, service.number), 80).into())
}

/// Starts continuous traffic of a client outside, of a process of the node, and of a pod.
fn traffic(fixture: &Fixture) -> Result<()> {
    let cache = Attempt::new(SocketKind::Udp, (cluster_ip(Family::V6, CACHE.number), 53).into());
    let load = |attempt, pause| Load::new(attempt, false).paced(pause);
    fixture.client.load(&[
        load(to(SHOP), 25),
        load(to(CART), 60),
        load(to(PAYMENTS), 400),
        load(cache, 90),
    ])?;
    fixture.local.load(&[load(to(SEARCH), 40), load(to(ORDERS), 110)])?;
    fixture.pod(0)?.load(&[load(to(ORDERS), 70)])
}

fn browse(fixture: &Fixture) -> Result<()> {
    let folder = fixture.bpffs().with_file_name("browser");
    std::fs::create_dir(&folder)?;
    let browser = Browser::start(&fixture.node, &folder)?;
    traffic(fixture)?;
    browser.resize(1280, 900, false)?;
    browser.prefer("light")?;
    browser.open(URL)?;
    updates(&browser)?;
    keys(&browser)?;
    search(&browser)?;
    colours(&browser)?;
    phone(&browser)?;
    accessible(&browser)?;
    let complaints = browser.complaints()?;
    ensure!(complaints.is_empty(), "the console: {complaints:#?}");
    // The browser refuses to parse text as markup.
    let markup =
        "(() => { try { document.body.innerHTML = '<b>x</b>'; return false } catch { return true } })()";
    ensure!(browser.value(markup)? == json!(true), "text becomes markup");
    if let Some(folder) = std::env::var_os("BALLAST_SCREENSHOTS") {
        pictures(&browser, Path::new(&folder))?;
    }
    away(fixture, &browser)
}

/// Returns the text of an element.
fn text(browser: &Browser, selector: &str) -> Result<String> {
    let found = browser.value(&format!("document.querySelector({selector:?})?.innerText ?? ''"))?;
    Ok(found.as_str().unwrap_or_default().to_owned())
}

/// Checks that rates appear and change, without a reload of the page.
fn updates(browser: &Browser) -> Result<()> {
    browser.becomes("document.getElementById('state').textContent === 'Live'")?;
    let row =
        "[...document.querySelectorAll('.services tbody tr')].find((row) => row.innerText.includes('shop'))";
    browser.becomes(&format!("Number({row}?.querySelector('.connections').textContent) > 1"))?;
    let before = text(browser, "#figures .connections .value")?;
    eventually(SOON, || {
        let now = text(browser, "#figures .connections .value")?;
        ensure!(now != before && now != "0", "still {now}");
        Ok(())
    })?;
    browser.becomes("document.title.includes('node')")?;
    // The map shows clients, Services and endpoints, and the edges between them.
    browser.becomes("document.querySelectorAll('.map .service').length >= 4")?;
    browser.becomes(
        "[...document.querySelectorAll('.map .client')].some((one) => one.textContent.includes('10.98.0.2'))",
    )?;
    browser.becomes("[...document.querySelectorAll('.map .client')].some((one) => one.textContent.includes('sockets') && one.textContent.includes('to 2 Services'))")?;
    browser.becomes("document.querySelectorAll('.map .endpoint').length >= 5 && document.querySelectorAll('.map .edge').length >= 8")?;
    // Refusals have an example, which names the original destination.
    browser.value("[...document.querySelectorAll('.drops button')].find((one) => one.textContent === 'no_endpoint').click()")?;
    browser.becomes(
        "document.querySelector('#reason-no_endpoint .examples').innerText.includes('10.96.0.24:80/TCP')",
    )
}

/// Returns a short name of the element that has the focus.
fn focus(browser: &Browser) -> Result<String> {
    let name = "(() => { const one = document.activeElement; return one.id || one.getAttribute('data-key') || one.textContent.trim().slice(0, 60) || one.tagName })()";
    Ok(browser.value(name)?.as_str().unwrap_or_default().to_owned())
}

/// Checks that everything works by keys, and that the focus is visible everywhere.
fn keys(browser: &Browser) -> Result<()> {
    browser.value(
        "document.body.tabIndex = -1; document.body.focus(); document.body.removeAttribute('tabindex')",
    )?;
    let mut met = Vec::new();
    for _ in 0..60 {
        browser.press("Tab")?;
        let seen = browser.value(
            "(() => { const one = document.activeElement; const style = getComputedStyle(one);\n\
             const box = one.querySelector('rect'); const stroke = box && parseFloat(getComputedStyle(box).strokeWidth);\n\
             return one === document.body || stroke >= 3 || (style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 2) })()",
        )?;
        let name = focus(browser)?;
        ensure!(seen == json!(true), "the focus is not seen at {name}");
        met.push(name);
    }
    let place = |name: &str| {
        met.iter()
            .position(|met| met.contains(name))
            .with_context(|| format!("no key leads to {name}: {met:?}"))
    };
    let order = ["Skip to", "search", "theme", "pause", "default/", "Conn/s", "no_endpoint"];
    let places = order.iter().map(|name| place(name)).collect::<Result<Vec<_>>>()?;
    ensure!(places.is_sorted(), "the order of the focus: {met:?}");
    // The map is one tab stop; arrow keys move inside it.
    browser.value("document.querySelector('.map [tabindex=\"0\"]').focus()")?;
    let service = focus(browser)?;
    browser.press("ArrowRight")?;
    let endpoint = focus(browser)?;
    ensure!(endpoint != service && endpoint.starts_with(&service), "right of {service}: {endpoint}");
    browser.press("ArrowLeft")?;
    ensure!(focus(browser)? == service, "and back");
    browser.press("Enter")?;
    browser.becomes(
        "!document.getElementById('detail').hidden && document.activeElement.id === 'detail-title'",
    )?;
    browser.press("Escape")?;
    browser.becomes("document.getElementById('detail').hidden")?;
    // Open the detail from the list; in the end, the focus returns to the same row.
    browser.value("[...document.querySelectorAll('.services .link')].find((one) => one.textContent === 'default/shop:http').focus()")?;
    browser.press("Enter")?;
    browser.becomes("document.querySelectorAll('.endpoints tbody tr').length === 3")?;
    // The slider reads the history.
    history(browser)?;
    browser.value("document.querySelector('input[type=range]').focus()")?;
    browser.press("ArrowLeft")?;
    browser.becomes(
        "/^1 s ago: [0-9.k]+ new connections per second$/.test(document.querySelector('.readout').textContent)",
    )?;
    browser.value("document.getElementById('metric-bytes').click()")?;
    browser.becomes("/B bytes per second$/.test(document.querySelector('.readout').textContent)")?;
    browser.press("Escape")?;
    browser.becomes("document.getElementById('detail').hidden")?;
    ensure!(focus(browser)? == "default/shop:http", "the focus is at {}", focus(browser)?);
    // The browser's own way back opens the detail again.
    browser.value("history.back()")?;
    browser.becomes("!document.getElementById('detail').hidden")?;
    browser.press("Escape")?;
    browser.becomes("document.getElementById('detail').hidden")
}

/// Script that waits until the history is drawn anew, and returns the number of points that are drawn, the number that
/// the picture's label names, and the number that the agent has.
const REDRAWN: &str = r"(async () => {
  const picture = document.querySelector('.history');
  const line = picture.querySelector('.line');
  await new Promise((done) => {
    const observer = new MutationObserver(() => { observer.disconnect(); done() });
    observer.observe(line, { attributes: true, attributeFilter: ['d'] });
  });
  const drawn = line.getAttribute('d').split(/[ML]/).length - 1;
  const named = Number(picture.getAttribute('aria-label').match(/(\d+) points/)[1]);
  const answer = await (await fetch('/page/history?service=' + encodeURIComponent('default/shop:http/TCP/IPv4'))).json();
  return { drawn, named, kept: answer.points.length, interval: answer.interval };
})()";

/// Checks that the chart of the selected Service shows the points that the agent keeps, one for each second, and adds new ones.
fn history(browser: &Browser) -> Result<()> {
    let points = || -> Result<([u64; 3], [Instant; 2])> {
        let asked = Instant::now();
        let redrawn = browser.value(REDRAWN)?;
        ensure!(redrawn["interval"] == 1, "240 points in 4 minutes: {redrawn}");
        let count = |name: &str| redrawn[name].as_u64().with_context(|| format!("no {name}: {redrawn}"));
        Ok(([count("drawn")?, count("named")?, count("kept")?], [asked, Instant::now()]))
    };
    browser.becomes("document.querySelector('.history .line').getAttribute('d').length > 10")?;
    let (first, began) = points()?;
    sleep(Duration::from_secs(5));
    let (second, ended) = points()?;
    for [drawn, named, kept] in [first, second] {
        let is_kept = drawn > 1 && drawn == named && drawn.abs_diff(kept) <= 2;
        ensure!(is_kept, "{drawn} points are drawn, {named} named, {kept} kept");
    }
    // The answer may be late.
    let least = ended[0].duration_since(began[1]).as_secs();
    let most = ended[1].duration_since(began[0]).as_secs();
    let added = second[0] - first[0];
    ensure!(
        added + 2 >= least && added <= most + 2,
        "{added} points more in {least} to {most} s: {first:?}, {second:?}"
    );
    Ok(())
}

fn search(browser: &Browser) -> Result<()> {
    browser.value("document.getElementById('search').focus()")?;
    browser.enter("10.96.0.23")?;
    browser.becomes("document.querySelectorAll('.services tbody tr').length === 1 && document.querySelector('.services tbody').innerText.includes('orders')")?;
    browser.value("(() => { const one = document.getElementById('search'); one.value = ''; one.dispatchEvent(new Event('input')) })()")?;
    browser.becomes("document.querySelectorAll('.services tbody tr').length > 5")
}

/// Script that returns visible text with a contrast below 4.5:1 (WCAG 2, AA).
const FAINT: &str = r"(() => {
  const parse = (text) => { const all = text.match(/[\d.]+/g).map(Number); return text.startsWith('color(') ? [...all.slice(0, 3).map((one) => one * 255), all[3] ?? 1] : [...all.slice(0, 3), all[3] ?? 1] };
  const light = ([r, g, b]) => { const [x, y, z] = [r, g, b].map((one) => { const part = one / 255; return part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4 }); return 0.2126 * x + 0.7152 * y + 0.0722 * z };
  const ground = (one) => { for (let at = one; at; at = at.parentElement) { const box = at.matches('g.box') ? at.querySelector('rect') : null; const colour = parse(box ? getComputedStyle(box).fill : getComputedStyle(at).backgroundColor); if (colour[3] > 0.75) return colour } return [255, 255, 255] };
  const faint = [];
  for (const one of document.querySelectorAll('body *')) {
    const own = [...one.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
    if (!own || !one.checkVisibility() || one.closest('title, option, .unseen')) continue;
    const style = getComputedStyle(one);
    const [a, b] = [light(parse(one instanceof SVGElement ? style.fill : style.color)), light(ground(one))];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < 4.5) faint.push(`${contrast.toFixed(2)} ${one.tagName}.${one.getAttribute('class')} ${one.textContent.slice(0, 30)}`);
  }
  return faint;
})()";

/// Script that returns the brightness of the page's background; 1 is white.
const GROUND: &str = "getComputedStyle(document.body).backgroundColor.match(/[\\d.]+/g).slice(0, 3).reduce((sum, part) => sum + Number(part), 0) / 765";

fn colours(browser: &Browser) -> Result<()> {
    let is = |expected: &str| -> Result<()> {
        let ground = browser.value(GROUND)?.as_f64().context("no colour")?;
        ensure!(
            (ground > 0.5) == (expected == "light"),
            "{expected} is asked for, and the ground is {ground}"
        );
        let faint = browser.value(FAINT)?;
        ensure!(faint == json!([]), "{expected}: {faint:#}");
        Ok(())
    };
    is("light")?;
    browser.prefer("dark")?;
    is("dark")?;
    // The user's choice has priority over the system's, and is kept.
    let choose = |theme: &str| {
        browser.value(&format!(
            "(() => {{ const one = document.getElementById('theme'); one.value = '{theme}'; one.dispatchEvent(new Event('change')) }})()"
        ))
    };
    choose("light")?;
    is("light")?;
    browser.open(URL)?;
    browser.becomes("document.querySelectorAll('.services tbody tr').length > 5")?;
    is("light")?;
    choose("auto")?;
    is("dark")?;
    browser.prefer("light")
}

fn phone(browser: &Browser) -> Result<()> {
    browser.resize(320, 640, true)?;
    browser.becomes("window.innerWidth === 320")?;
    // The map is drawn anew for the width.
    browser.becomes("document.documentElement.scrollWidth <= 320 && document.querySelector('.map').getBoundingClientRect().width <= 320")?;
    browser.value("[...document.querySelectorAll('.services .link')].find((one) => one.textContent === 'default/shop:http').click()")?;
    browser.becomes("document.querySelectorAll('.endpoints tbody tr').length === 3")?;
    let width = browser.value("document.documentElement.scrollWidth")?;
    ensure!(width == json!(320), "with the endpoints of a Service it is {width} wide");
    // Controls for fingers are large enough (WCAG 2.2: 24 px).
    let small = browser.value(
        "[...document.querySelectorAll('button, select, input[type=search]')].filter((one) => one.checkVisibility() && !one.closest('thead') && one.getBoundingClientRect().height < 24).map((one) => one.outerHTML)",
    )?;
    ensure!(small == json!([]), "too small for a finger: {small:#}");
    browser.value("document.querySelector('#detail .close').click()")?;
    browser.resize(1280, 900, false)
}

/// Checks that every element that can be used has a name for assistive technology.
fn accessible(browser: &Browser) -> Result<()> {
    let tree = browser.call("Accessibility.getFullAXTree", &json!({}))?;
    let nodes = tree["nodes"].as_array().context("no tree")?;
    let is_used = |node: &&Value| {
        let role = node["role"]["value"].as_str().unwrap_or_default();
        !node["ignored"].as_bool().unwrap_or_default()
            && ["button", "link", "searchbox", "combobox", "slider", "radio", "table", "region", "image"]
                .contains(&role)
    };
    let used: Vec<_> = nodes.iter().filter(is_used).collect();
    ensure!(used.len() > 20, "only {} can be used", used.len());
    let nameless: Vec<_> =
        used.iter().filter(|node| node["name"]["value"].as_str().is_none_or(str::is_empty)).collect();
    ensure!(nameless.is_empty(), "without a name: {nameless:#?}");
    Ok(())
}

/// Takes the pictures of docs/page.md.
fn pictures(browser: &Browser, folder: &Path) -> Result<()> {
    // The curves need some data.
    sleep(Duration::from_secs(100));
    browser.value("scrollTo(0, 0)")?;
    browser.picture(&folder.join("light.png"))?;
    browser.value("[...document.querySelectorAll('.services .link')].find((one) => one.textContent === 'default/shop:http').click()")?;
    browser.prefer("dark")?;
    browser.becomes("document.querySelectorAll('.endpoints tbody tr').length === 3")?;
    sleep(Duration::from_secs(3));
    browser.picture(&folder.join("dark.png"))?;
    browser.value("document.querySelector('#detail .close').click()")?;
    browser.prefer("light")?;
    browser.resize(360, 740, true)?;
    browser.value("scrollTo(0, 0)")?;
    sleep(Duration::from_secs(3));
    browser.picture(&folder.join("phone.png"))?;
    browser.resize(1280, 900, false)
}

/// Checks that the page reports the end of the agent, and continues with the next agent.
fn away(fixture: &Fixture, browser: &Browser) -> Result<()> {
    fixture.kill()?;
    browser.becomes("document.getElementById('state').className === 'lost'")?;
    fixture.begin()?;
    browser.becomes("document.getElementById('state').textContent === 'Live'")
}

/// Checks that `--page services` shows no more than `/metrics`.
fn closed(fixture: &Fixture) -> Result<()> {
    fixture.client.reach(to(SHOP))?;
    fixture.client.fails(to(PAYMENTS), libc::ECONNREFUSED)?;
    let folder = fixture.bpffs().with_file_name("browser");
    std::fs::create_dir(&folder)?;
    let browser = Browser::start(&fixture.node, &folder)?;
    browser.open(URL)?;
    browser.becomes("document.querySelector('.services tbody').innerText.includes('shop')")?;
    browser.becomes("document.getElementById('map-section').hidden")?;
    browser.value("[...document.querySelectorAll('.services .link')].find((one) => one.textContent === 'default/shop:http').click()")?;
    browser.becomes("document.getElementById('detail').innerText.includes('the history is switched off')")?;
    browser.value("[...document.querySelectorAll('.drops button')].find((one) => one.textContent === 'no_endpoint').click()")?;
    let page = browser.value("document.body.innerText")?.to_string();
    for address in ["10.96.0.", "10.98.0.", "10.99."] {
        ensure!(!page.contains(address), "an address is shown: {page}");
    }
    // The page accepts the node's name as `Host`, and refuses other names (DNS rebinding).
    let (status, _) = get(&fixture.node, 10_249, "/")?;
    ensure!(status == 200, "by the node's name: {status}");
    Ok(())
}
