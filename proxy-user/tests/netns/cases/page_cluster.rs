//! `kubectl ballast ui` in a real browser: one page for two agents, each on a node of its own. The API server between
//! them is a mock that forwards connections to the agents (`pods/portforward`).

use std::collections::BTreeMap;
use std::io::{self, BufRead as _, BufReader};
use std::net::TcpStream;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Child, Stdio};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use tokio::runtime::Runtime;
use tokio_tungstenite::WebSocketStream;

use super::{Case, tcp};
use crate::agent::binary;
use crate::browser::Browser;
use crate::fixture::{Fixture, SOON, Wish, eventually};
use crate::mock::{self, Answers, agents_pod};
use crate::peer::{Attempt, Load, SocketKind};
use proxy_testbed::Family;
use proxy_testbed::manifest::{Service, cluster_ip};
use proxy_testbed::space::Space;

const SHOP: Service = Service { name: "shop", number: 20, ports: &[tcp(80, 8080, &[0])] };
const CART: Service = Service { name: "cart", number: 21, ports: &[tcp(80, 9090, &[0])] };
#[rustfmt::skip]
const FLAGS: &[&str] = &[
    "--page", "all", "--page-history", "4m", "--metrics-bind-address", "127.0.0.1:10249",
    "--max-services", "64", "--max-frontends", "64", "--max-slots", "1024", "--max-backends", "256",
    "--max-flows", "16384", "--max-sockets", "4096",
];
const WISH: Wish = Wish { pods: 1, services: &[SHOP, CART], flags: FLAGS };
const PORT: u16 = 10_249;

pub const CASES: &[Case] =
    &[Case { name: "page_cluster::two_nodes_are_one_page_in_a_browser", wish: WISH, run: browse }];

/// An API server that knows the pods of two agents: by the name of each node, a function that connects to its agent.
struct Api(BTreeMap<&'static str, Box<dyn Fn() -> io::Result<TcpStream> + Send + Sync>>);

impl Answers for Api {
    fn get(&self, _: &str) -> (u16, Value) {
        let ports = json!([{ "name": "metrics", "containerPort": PORT }]);
        let pods: Vec<_> = self.0.keys().map(|node| agents_pod(node, &ports)).collect();
        (200, json!({ "metadata": {}, "items": pods }))
    }

    async fn session(
        &self,
        node: &str,
        _: &str,
        socket: WebSocketStream<tokio::net::TcpStream>,
    ) -> io::Result<()> {
        let agent = self.0[node]().and_then(|stream| {
            stream.set_nonblocking(true)?;
            tokio::net::TcpStream::from_std(stream)
        });
        mock::forward(socket, PORT, agent.ok()).await
    }
}

/// The plugin; dropping it ends the plugin.
struct Plugin(Child);

impl Drop for Plugin {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Plugin {
    /// Starts the plugin; returns it, and the address of its page.
    fn start(space: &Space, folder: &Path, kubeconfig: &Path) -> Result<(Self, String)> {
        let program = folder.join("kubectl-ballast");
        symlink(binary(), &program)?;
        let mut command = space.command(&program);
        command.arg("--kubeconfig").arg(kubeconfig).args(["ui", "--port", "0"]).stdout(Stdio::piped());
        let mut plugin = Self(command.spawn().context("cannot start kubectl-ballast")?);
        let mut line = String::new();
        BufReader::new(plugin.0.stdout.take().context("no output")?).read_line(&mut line)?;
        ensure!(line.contains("shows 2 nodes"), "{line:?}");
        let url = line.split(' ').next().context("no address")?.to_owned();
        Ok((plugin, url))
    }
}

fn to(service: Service) -> Load {
    Load::new(Attempt::new(SocketKind::Tcp, (cluster_ip(Family::V4, service.number), 80).into()), false)
}

fn browse(one: &Fixture) -> Result<()> {
    let folder = one.bpffs().with_file_name("browser");
    std::fs::create_dir(&folder)?;
    let other = Fixture::new(WISH)?;
    "other".clone_into(&mut other.setup().name);
    other.begin()?;
    // The client of one node connects to one Service; the clients of the other node connect to both.
    one.client.load(&[to(SHOP).paced(20)])?;
    other.client.load(&[to(SHOP).paced(40), to(CART).paced(30)])?;
    other.local.load(&[to(SHOP).paced(100)])?;

    let runtime = Runtime::new()?;
    let agent = |space: &Space| -> Result<Box<dyn Fn() -> io::Result<TcpStream> + Send + Sync>> {
        let space = space.try_clone()?;
        Ok(Box::new(move || {
            let connect = || Ok(TcpStream::connect(("127.0.0.1", PORT))?);
            space.inside(connect).map_err(io::Error::other)
        }))
    };
    let api = Api([("node", agent(&one.node)?), ("other", agent(&other.node)?)].into());
    let kubeconfig = one.node.inside(|| Ok(runtime.block_on(mock::start(api, &folder))))?;
    let (_plugin, url) = Plugin::start(&one.node, &folder, &kubeconfig)?;
    let browser = Browser::start(&one.node, &folder)?;
    browser.resize(1280, 900, false)?;
    browser.open(&url)?;
    browser.becomes("document.getElementById('state').textContent === 'Live'")?;
    browser.becomes("document.title === 'Ballast · 2 nodes'")?;
    rates(&browser)?;
    map(&browser)?;
    let complaints = browser.complaints()?;
    ensure!(complaints.is_empty(), "the console: {complaints:#?}");
    // The page names an agent that does not answer, and still updates the rates of the other one.
    other.kill()?;
    browser.becomes("document.getElementById('problems').innerText.includes('other')")?;
    browser.becomes(&format!("{} > 1", rate("shop")))?;
    other.begin()?;
    browser.becomes("document.getElementById('problems').hidden")
}

/// Returns a script for a Service's connections per second, as the list shows them; 0 if the Service is not listed.
fn rate(service: &str) -> String {
    format!(
        "Number([...document.querySelectorAll('.services tbody tr')].find((row) => row.innerText.includes('{service}'))?.querySelector('.connections').textContent ?? 0)"
    )
}

/// Checks that the rates of the cluster are the sums of its nodes' rates.
fn rates(browser: &Browser) -> Result<()> {
    let of = |node: &str, service: &str| -> Result<f64> {
        browser.value(&format!(
            "(() => {{ const one = document.getElementById('node'); one.value = '{node}'; one.dispatchEvent(new Event('change')) }})()"
        ))?;
        browser.value(&rate(service))?.as_f64().context("no rate")
    };
    browser.becomes("!document.getElementById('node-choice').hidden && document.getElementById('node').options.length === 3")?;
    eventually(SOON, || {
        let [here, there, all] = [of("node", "shop")?, of("other", "shop")?, of("", "shop")?];
        ensure!(here > 1.0 && there > 1.0, "shop: {here} and {there} a second");
        // The rates are read one after the other.
        ensure!((all - here - there).abs() < 0.2 * all, "shop: {here} and {there} a second, {all} in all");
        let [here, there, all] = [of("node", "cart")?, of("other", "cart")?, of("", "cart")?];
        ensure!(here == 0.0 && there > 1.0 && all > 1.0, "cart: {here} and {there} a second, {all} in all");
        Ok(())
    })
}

/// Checks that the map has the clients of both nodes, and says what it estimates.
fn map(browser: &Browser) -> Result<()> {
    browser.becomes("[...document.querySelectorAll('.map .client')].some((one) => one.textContent.includes('sockets of nodes and pods'))")?;
    browser.becomes("[...document.querySelectorAll('.map .client')].some((one) => one.textContent.includes('10.98.0.2') && one.textContent.includes('to 2 Services'))")?;
    browser.becomes("document.getElementById('map-hint').innerText.includes('estimate')")
}
