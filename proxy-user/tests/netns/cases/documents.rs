//! Runs the commands of README and docs on a node as the pages describe it, and compares their output with the pages.
//!
//! The comment before each block of commands says where the block is run, and lists the parts of the block that vary
//! from run to run. The line `...` stands for any number of lines. If a unit test compares a block instead, the comment
//! is `<!-- compared by: kubectl::tests -->`.
//!
//! ````text
//! <!-- run: node; varies: 40312, 16:03:12.123Z -->
//! ```console
//! $ sudo ballast flow list
//! ````

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail, ensure};

use super::{Case, tcp, udp};
use crate::agent::{ask, binary};
use crate::fixture::{Fixture, SMALL, SOON, Wish, eventually};
use crate::peer::{Attempt, SocketKind};
use proxy_testbed::Family;
use proxy_testbed::manifest::{Port, Service, cluster_ip};

const WEB: Service = Service {
    name: "web",
    number: 10,
    ports: &[Port { name: "http", is_tcp: true, number: 80, target: 8080, pods: &[0, 1] }],
};
const DNS: Service = Service { name: "dns", number: 53, ports: &[udp(53, 5353, &[0])] };
const EMPTY: Service = Service { name: "empty", number: 11, ports: &[tcp(80, 8080, &[])] };

pub const CASES: &[Case] = &[
    Case {
        name: "documents::commands_print_what_the_pages_show",
        wish: Wish { pods: 2, services: &[WEB, DNS, EMPTY], flags: &["--connect-latency"] },
        run: |fixture| {
            traffic(fixture)?;
            compare(fixture, "node", 12)
        },
    },
    Case {
        name: "documents::the_examples_are_served_as_the_pages_show",
        wish: Wish { pods: 0, services: &[], flags: SMALL },
        run: of_examples,
    },
];

/// Start of the comment before a block that is run; the place follows: `node` or `examples`.
const RUN: &str = "<!-- run: ";
/// Start of the comment before a block that a unit test compares.
const COMPARED: &str = "<!-- compared by: ";

/// A command, and the output that the page shows.
#[derive(Debug)]
struct Example {
    place: String,
    page: PathBuf,
    line: usize,
    command: String,
    output: Vec<String>,
    varies: Vec<String>,
}

/// Runs the commands of the examples, on a node whose folder of manifests is deploy/examples.
fn of_examples(fixture: &Fixture) -> Result<()> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/examples/redis.yaml");
    fixture.folder.put_text("redis", &fs::read_to_string(file)?)?;
    eventually(SOON, || {
        let services = ask(&fixture.node, &["service", "list"], &fixture.bpffs())?;
        ensure!(services["frontends"].as_array().is_some_and(|all| all.len() == 2), "{services}");
        Ok(())
    })?;
    compare(fixture, "examples", 2)
}

/// Runs the commands of a place. The pages must have at least `at_least` of them, so that a change of the comment's
/// format cannot leave them out.
fn compare(fixture: &Fixture, place: &str, at_least: usize) -> Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut pages: Vec<_> =
        fs::read_dir(root.join("docs"))?.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?;
    pages.retain(|page| page.extension().is_some_and(|ext| ext == "md"));
    pages.push(root.join("README.md"));
    pages.sort();
    let mut examples = Vec::new();
    for page in pages {
        let text = fs::read_to_string(&page).with_context(|| format!("cannot read {}", page.display()))?;
        examples.extend(read(&page, &text)?);
    }
    examples.retain(|example| example.place == place);
    ensure!(examples.len() >= at_least, "only {} commands are marked", examples.len());
    let failures: Vec<_> = examples.iter().filter_map(|example| run(fixture, example).err()).collect();
    if !failures.is_empty() {
        let errors: Vec<_> = failures.iter().map(|failure| format!("{failure:#}")).collect();
        bail!("{}", errors.join("\n\n"));
    }
    Ok(())
}

/// Opens one connection of each path that stays open, and makes one that is refused.
fn traffic(fixture: &Fixture) -> Result<()> {
    let web = (cluster_ip(Family::V4, WEB.number), 80).into();
    fixture.client.open(1, Attempt::new(SocketKind::Tcp, web).at_port(40_312))?;
    fixture.client.hears(1, None)?;
    fixture.local.open(1, Attempt::new(SocketKind::Tcp, web))?;
    fixture.local.hears(1, None)?;
    let dns = (cluster_ip(Family::V4, DNS.number), 53).into();
    fixture.client.reach(Attempt::new(SocketKind::Udp, dns).at_port(40_313))?;
    let empty = Attempt::new(SocketKind::Tcp, (cluster_ip(Family::V4, EMPTY.number), 80).into());
    fixture.client.fails(empty, libc::ECONNREFUSED)?;
    // The client's last segment may still be in transit.
    eventually(SOON, || {
        let flows = ask(&fixture.node, &["flow", "list"], &fixture.bpffs())?.to_string();
        ensure!(flows.contains("\"established\""), "no connection is established: {flows}");
        Ok(())
    })
}

/// Returns the commands of a page; fails if no test compares a block.
fn read(page: &Path, text: &str) -> Result<Vec<Example>> {
    let mut examples: Vec<Example> = Vec::new();
    let mut lines = text.lines().enumerate();
    while let Some((at, line)) = lines.next() {
        let place = || format!("{}:{}", page.display(), at + 1);
        ensure!(line != "```console", "{}: no test compares this block", place());
        if line.starts_with(COMPARED) {
            lines.next();
        }
        let Some(mark) = line.strip_prefix(RUN) else { continue };
        let mark = mark.strip_suffix("-->").with_context(|| format!("{}: no `-->`", place()))?.trim();
        let (where_to, varies) = mark.split_once("; varies:").unwrap_or((mark, ""));
        let varies: Vec<_> =
            varies.split(',').map(str::trim).filter(|one| !one.is_empty()).map(str::to_owned).collect();
        ensure!(
            ["node", "examples"].contains(&where_to),
            "{}: not `<!-- run: node; varies: ... -->`",
            place()
        );
        ensure!(lines.next().is_some_and(|(_, line)| line == "```console"), "{}: no block follows", place());
        let first = examples.len();
        for (at, line) in lines.by_ref().take_while(|(_, line)| *line != "```") {
            if let Some(command) = line.strip_prefix("$ ") {
                let (page, varies) = (page.to_owned(), varies.clone());
                examples.push(Example {
                    place: where_to.to_owned(),
                    page,
                    line: at + 1,
                    command: command.to_owned(),
                    output: Vec::new(),
                    varies,
                });
            } else {
                let example = examples[first..].last_mut();
                example
                    .with_context(|| format!("{}: output without command", place()))?
                    .output
                    .push(line.to_owned());
            }
        }
    }
    Ok(examples)
}

/// Runs a command in a shell on the node.
fn run(fixture: &Fixture, example: &Example) -> Result<()> {
    let Example { place: _, page, line, command, output: expected, varies } = example;
    // The shell finds the program by its name in a folder of the fixture.
    let folder = fixture.bpffs().with_file_name("bin");
    if !folder.exists() {
        fs::create_dir(&folder)?;
        symlink(binary(), folder.join("ballast"))?;
    }
    let path = format!("{}:{}", folder.display(), std::env::var("PATH").unwrap_or_default());
    let without_sudo =
        command.replace("sudo ", "").replace("/sys/fs/bpf/", &format!("{}/", fixture.bpffs().display()));
    let mut shell = fixture.node.command("sh");
    shell.args(["-c", &without_sudo]).env("PATH", path).env("BALLAST_BPFFS", fixture.bpffs());
    let output = shell.output().context("cannot run sh")?;
    let (printed, error) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    let place = format!("{}:{line}: `{command}`", page.display());
    ensure!(output.status.success(), "{place}: {}: {printed}{error}", output.status);
    let found: Vec<_> = printed.lines().collect();
    ensure!(fits(expected, &found, varies), "{place} printed\n{printed}instead of\n{}", expected.join("\n"));
    Ok(())
}

/// Whether the output is as expected, apart from spaces and the parts that vary.
fn fits(expected: &[String], found: &[&str], varies: &[String]) -> bool {
    match expected.split_first() {
        None => found.is_empty(),
        Some((first, rest)) if first == "..." => {
            (0..=found.len()).any(|skipped| fits(rest, &found[skipped..], varies))
        }
        Some((first, rest)) => {
            let Some((line, others)) = found.split_first() else { return false };
            is_line(first, line, varies) && fits(rest, others, varies)
        }
    }
}

/// Compares the words of two lines. A part that varies may be within a word, between signs; any other text may replace it.
fn is_line(expected: &str, found: &str, varies: &[String]) -> bool {
    let words = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    let (expected, found) = (words(expected), words(found));
    let is_edge = |c: Option<char>| c.is_none_or(|c| !c.is_alphanumeric() && c != '.');
    let varies_to = |expected: &str, part: &str, found: &str| {
        let (before, after) = expected.split_once(part)?;
        let is_whole = is_edge(before.chars().last()) && is_edge(after.chars().next());
        let rest = found.strip_prefix(before)?.strip_suffix(after)?;
        (is_whole && !rest.is_empty()).then_some(())
    };
    let is_word = |(expected, found): (&String, &String)| {
        expected == found || varies.iter().any(|part| varies_to(expected, part, found).is_some())
    };
    expected.len() == found.len() && expected.iter().zip(&found).all(is_word)
}
