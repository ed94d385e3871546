//! Generates `docs/benchmarks`: the figures of one run as tables and plots, with the machine on which they were measured.

use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Context as _, Result, bail};
use fs_err as fs;

use super::chart::{self, Figure, number};
use crate::exec::Cmd;

/// What a reader must know about the machine and the version that was measured.
#[derive(Clone, Debug, Default)]
pub struct Machine {
    kernel: String,
    processor: String,
    cpus: usize,
    memory_gib: u64,
    commit: String,
    date: String,
}

impl Machine {
    /// Describes this machine, and the commit that is checked out in `root`.
    pub fn this(root: &Path) -> Self {
        let text = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let field = |text: &str, name: &str| {
            let line = text.lines().find(|line| line.starts_with(name)).unwrap_or_default();
            line.split_once(':').map(|(_, value)| value.trim().to_owned()).unwrap_or_default()
        };
        let memory = field(&text("/proc/meminfo"), "MemTotal");
        let kib: u64 = memory.split(' ').next().and_then(|kib| kib.parse().ok()).unwrap_or_default();
        let commit = Cmd::new("git").args(["rev-parse", "--short=12", "HEAD"]).dir(root).try_read();
        Self {
            kernel: text("/proc/sys/kernel/osrelease").trim().to_owned(),
            processor: field(&text("/proc/cpuinfo"), "model name"),
            cpus: std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
            memory_gib: kib.div_ceil(1 << 20),
            commit: commit.unwrap_or_default().trim().to_owned(),
            date: jiff::Zoned::now().date().to_string(),
        }
    }
}

/// Writes `README.md` and the plots into the folder, and removes the plots of an earlier run.
pub fn write(json: &str, machine: &Machine, folder: &Path) -> Result<()> {
    let figures: Vec<Figure> =
        serde_json::from_str(json).context("the benchmark's figures cannot be read")?;
    if figures.is_empty() {
        bail!("the benchmark measured nothing");
    }
    fs::create_dir_all(folder)?;
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "svg") {
            fs::remove_file(&path)?;
        }
    }
    let put = |name: &str, text: &str| {
        let path = folder.join(name);
        Ok(fs::write(&path, text)?)
    };
    for (name, figures) in plots(&figures) {
        put(&name, &chart::bars(&figures)?)?;
    }
    put("README.md", &text(&figures, machine))
}

/// Returns the groups in the order in which they were measured.
fn groups(figures: &[Figure]) -> Vec<&str> {
    let mut groups = Vec::new();
    for figure in figures {
        if !groups.contains(&figure.group.as_str()) {
            groups.push(&figure.group);
        }
    }
    groups
}

/// Returns one plot for each group and unit: its file name, and its figures.
fn plots(figures: &[Figure]) -> Vec<(String, Vec<&Figure>)> {
    let mut plots: Vec<(String, Vec<&Figure>)> = Vec::new();
    for figure in figures {
        let name = format!("{}-{}.svg", word(&figure.group), unit_word(&figure.unit));
        match plots.iter_mut().find(|(other, _)| *other == name) {
            Some((_, figures)) => figures.push(figure),
            None => plots.push((name, vec![figure])),
        }
    }
    plots
}

fn word(text: &str) -> String {
    let letter = |c: char| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '-' };
    text.chars()
        .map(letter)
        .collect::<String>()
        .split('-')
        .filter(|part| !part.is_empty())
        .collect::<Vec<_>>()
        .join("-")
}

fn unit_word(unit: &str) -> String {
    match unit {
        "x" => "ratio".to_owned(),
        "%" => "percent".to_owned(),
        other => word(other),
    }
}

fn text(figures: &[Figure], machine: &Machine) -> String {
    let mut page = String::from(
        "# Benchmarks\n\nOne command measures everything again and writes this folder:\n\n```sh\nsudo -E env \"PATH=$PATH\" cargo xtask test bench --page docs/benchmarks\n```\n\n\
         Compare ratios, not absolute times: both sides of a ratio are measured in turn in the same run. \
         A figure above its target is marked, and its bar is red; the black line is the target. Where a figure is of many rounds, \
         the middle half of them is between the two numbers beside it.\n\n",
    );
    let Machine { kernel, processor, cpus, memory_gib, commit, date } = machine;
    let _ = writeln!(
        page,
        "| machine | |\n|---|---|\n| kernel | {kernel} |\n| processor | {processor}, {cpus} CPUs |"
    );
    let _ = writeln!(page, "| memory | {memory_gib} GiB |\n| commit | {commit} |\n| date | {date} |");
    let plots = plots(figures);
    for group in groups(figures) {
        let _ = writeln!(page, "\n## {group}\n");
        let of_group = |plot: &&(String, Vec<&Figure>)| plot.1.iter().any(|figure| figure.group == group);
        for (name, figures) in plots.iter().filter(of_group) {
            let unit = figures.first().map_or("", |figure| figure.unit.as_str());
            let _ = writeln!(page, "![{group}, in {unit}]({name})\n");
        }
        page.push_str("| figure | measured | middle half | target | |\n|---|--:|--:|--:|---|\n");
        for figure in figures.iter().filter(|figure| figure.group == group) {
            let target = figure.target.map(|target| format!("≤ {}", number(target, &figure.unit)));
            let missed = if figure.is_missed() { "missed" } else { "" };
            let measured = number(figure.value, &figure.unit);
            let spread = figure.quartiles.map(|ends| {
                let [low, high] = ends.map(|end| number(end, &figure.unit));
                format!("{low} to {high}")
            });
            let _ = writeln!(
                page,
                "| {} | {measured} | {} | {} | {missed} |",
                figure.what,
                spread.unwrap_or_default(),
                target.unwrap_or_default()
            );
        }
    }
    page
}

#[cfg(test)]
mod tests {
    use super::*;

    const JSON: &str = r#"[
        {"group": "packet path", "what": "known flow, IPv4", "unit": "ns", "value": 71.6, "quartiles": [70.0, 72.2], "target": 45.0, "of_target": 1.59},
        {"group": "packet path", "what": "10,000 Services to 10", "unit": "x", "value": 1.0, "target": null, "of_target": null},
        {"group": "agent", "what": "first <sync>", "unit": "s", "value": 0.5, "target": 1.0, "of_target": 0.5}
    ]"#;

    #[test]
    fn a_run_becomes_tables_and_plots() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("of-an-earlier-run.svg"), "").unwrap();
        let machine = Machine { kernel: "6.1.0".to_owned(), cpus: 2, ..Machine::default() };
        write(JSON, &machine, folder.path()).unwrap();
        let names: std::collections::BTreeSet<_> = fs::read_dir(folder.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        assert_eq!(
            names.iter().map(String::as_str).collect::<Vec<_>>(),
            ["README.md", "agent-s.svg", "packet-path-ns.svg", "packet-path-ratio.svg"]
        );
        let page = fs::read_to_string(folder.path().join("README.md")).unwrap();
        for line in [
            "| kernel | 6.1.0 |",
            "## packet path",
            "![packet path, in x](packet-path-ratio.svg)",
            "| known flow, IPv4 | 71.6 ns | 70.0 ns to 72.2 ns | ≤ 45.0 ns | missed |",
            "| 10,000 Services to 10 | 1.000 x |  |  |  |",
            "| first <sync> | 0.5 s |  | ≤ 1.0 s |  |",
        ] {
            assert!(page.lines().any(|other| other == line), "no `{line}` in\n{page}");
        }
        let svg = fs::read_to_string(folder.path().join("agent-s.svg")).unwrap();
        assert!(svg.contains("first &lt;sync&gt;") && svg.contains("0.5 s"), "{svg}");
    }

    /// Each row of README's table (name, IPv4, IPv6) must quote the measured values of the page.
    #[test]
    fn readme_quotes_what_was_measured() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let read = |path| fs::read_to_string(root.join(path)).unwrap();
        let (readme, page) = (read("README.md"), read("docs/benchmarks/README.md"));
        let measured = |group: &str, name: &str| {
            let (_, rows) = page.split_once(&format!("## {group}\n")).unwrap();
            let mut row = rows.lines().take_while(|line| !line.starts_with("## "));
            row.find_map(|line| line.strip_prefix(&format!("| {name} | ")))?.split(" |").next()
        };
        let (_, table) = readme.split_once("| figure | IPv4 | IPv6 |\n").unwrap();
        let rows: Vec<_> = table.lines().skip(1).take_while(|line| !line.is_empty()).collect();
        assert!(rows.len() >= 3, "{rows:?}");
        for row in rows {
            let cells: Vec<_> = row.trim_matches(['|', ' ']).split(" | ").collect();
            let [name, v4, v6] = cells[..] else { panic!("{row}") };
            assert_eq!(measured("IPv4 packets", name), Some(v4), "{name}");
            assert_eq!(measured("IPv6 packets", name), Some(v6), "{name}");
        }
    }

    #[test]
    fn a_missed_figure_has_another_color() {
        let figures: Vec<Figure> = serde_json::from_str(JSON).unwrap();
        let [missed, met] = [&figures[0], &figures[2]].map(|figure| chart::bars(&[figure]).unwrap());
        assert!(missed.contains("#BE503C") && !met.contains("#BE503C"), "{missed}");
    }
}
