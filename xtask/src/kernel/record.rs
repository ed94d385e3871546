//! Record of the verifier's costs for each program on each kernel: `docs/verifier.md`. `--record` writes it; without this
//! option, the costs of today's programs are compared with it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Context as _, Result, anyhow, bail};
use fs_err as fs;

/// Prefix of the tests' output lines with the cost of a program (`proxy-user/tests/netns/verify.rs`).
pub const MARK: &str = "verified\t";

/// Limit for instructions, in percent of the recorded number.
const PERCENT: u64 = 110;

const HEAD: &str = "# Costs of verification\n\n\
`cargo xtask test --kernel LINE` loads every program in every mode. It fails if the verifier processes over 10 % more instructions \
than this page has; the limit of kernels is one million. `--record` writes the column of the kernel.\n\n\
Each cell has the number of processed instructions, the size of the largest stack frame in bytes, and the time in milliseconds. The \
time is not compared: kernels that qemu emulates are about 20 times slower. `-`: the kernel lacks a feature that the program needs \
([kernels](operations.md#kernels)).\n\n";

/// Cost of a program: instructions, bytes of the largest frame, microseconds; `None` if the kernel lacks a feature it needs.
type Cost = Option<[u64; 3]>;

/// A program and its mode.
type Load = (String, String);

/// Contents of the file.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Record {
    /// Release of each column's kernel.
    releases: BTreeMap<Column, String>,
    loads: BTreeMap<Load, BTreeMap<Column, Cost>>,
}

/// Name of a kernel; sorted by version.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Column(Vec<u64>, String);

impl Column {
    fn new(name: &str) -> Self {
        let first = name.split(' ').next().unwrap_or_default();
        let numbers: Vec<_> = first.split('.').filter_map(|number| number.parse().ok()).collect();
        // A name without a number, such as `sid`, sorts as the newest.
        Self(if numbers.is_empty() { vec![u64::MAX] } else { numbers }, name.to_owned())
    }
}

/// Costs that the tests printed on one kernel.
#[derive(Debug)]
pub struct Found {
    column: Column,
    release: String,
    loads: BTreeMap<Load, Cost>,
}

impl Found {
    /// Reads the costs from the output lines of the tests.
    pub fn read(name: &str, release: &str, lines: &[String]) -> Result<Self> {
        let loads = lines
            .iter()
            .map(|line| load(line).ok_or_else(|| anyhow!("cannot read the line {line:?}")))
            .collect::<Result<_>>()?;
        Ok(Self { column: Column::new(name), release: release.to_owned(), loads })
    }

    /// Whether the tests loaded no program: they do not on a kernel that is too old.
    pub fn is_empty(&self) -> bool {
        self.loads.is_empty()
    }
}

fn load(line: &str) -> Option<(Load, Cost)> {
    // The line may begin with output of the test runner.
    let (_, rest) = line.split_once(MARK)?;
    let mut words = rest.split('\t');
    let load = (words.next()?.to_owned(), words.next()?.to_owned());
    let rest: Vec<_> = words.collect();
    let cost = match rest.as_slice() {
        ["-"] => None,
        [instructions, frame, time] => {
            Some([instructions.parse().ok()?, frame.parse().ok()?, time.parse().ok()?])
        }
        _ => return None,
    };
    Some((load, cost))
}

impl Record {
    /// Reads the file; a missing file is an empty record.
    pub fn open(path: &Path) -> Result<Self> {
        match fs::read_to_string(path) {
            Ok(text) => parse(&text).with_context(|| format!("{} is damaged", path.display())),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Self::default()),
            Err(error) => Err(error.into()),
        }
    }

    /// Whether the record has a column for this kernel.
    pub fn knows(&self, found: &Found) -> bool {
        self.releases.contains_key(&found.column)
    }

    /// Compares the costs with the kernel's column. Returns an error with all programs that are not recorded, rejected now,
    /// or over the limit.
    pub fn check(&self, found: &Found) -> Result<()> {
        let mut problems = Vec::new();
        for (load, cost) in &found.loads {
            let name = if load.1.is_empty() { load.0.clone() } else { format!("{} ({})", load.0, load.1) };
            match (self.loads.get(load).and_then(|row| row.get(&found.column)), cost) {
                (None, _) => problems.push(format!("{name} is not recorded")),
                (Some(Some(_)), None) => problems.push(format!("the kernel rejects {name} now")),
                (Some(Some([was, ..])), Some([is, ..])) if is * 100 > was * PERCENT => {
                    problems.push(format!("{name} needs {is} instructions instead of {was}"));
                }
                _ => {}
            }
        }
        if !problems.is_empty() {
            bail!("{}\nif it has to be so: --record", problems.join("\n"));
        }
        Ok(())
    }

    /// Replaces the kernel's column.
    pub fn put(&mut self, found: Found) {
        let Found { column, release, loads } = found;
        for row in self.loads.values_mut() {
            row.remove(&column);
        }
        self.loads.retain(|_, row| !row.is_empty());
        for (load, cost) in loads {
            self.loads.entry(load).or_default().insert(column.clone(), cost);
        }
        self.releases.insert(column, release);
    }

    /// Returns the text of the file.
    pub fn render(&self) -> String {
        let mut text = HEAD.to_owned();
        let mut row = |cells: Vec<String>| {
            // Writing to a String cannot fail.
            let _ = writeln!(text, "| {} |", cells.join(" | "));
        };
        let columns: BTreeSet<_> = self.releases.keys().collect();
        let with = |first: [&str; 2], cells: Vec<String>| {
            first.into_iter().map(str::to_owned).chain(cells).collect::<Vec<_>>()
        };
        row(with(["program", "mode"], columns.iter().map(|column| column.1.clone()).collect()));
        row(vec!["---".to_owned(); columns.len() + 2]);
        row(with(["release", ""], self.releases.values().cloned().collect()));
        for ((program, mode), costs) in &self.loads {
            let cell = |column: &&Column| costs.get(column).map_or_else(String::new, |cost| show(*cost));
            row(with([program, mode], columns.iter().map(cell).collect()));
        }
        text
    }
}

fn show(cost: Cost) -> String {
    cost.map_or_else(
        || "-".to_owned(),
        |[instructions, frame, time]| {
            format!("{instructions} / {frame} / {}.{}", time / 1000, time % 1000 / 100)
        },
    )
}

fn parse(text: &str) -> Result<Record> {
    let cells = |line: &str| {
        let inner = line.strip_prefix('|')?.strip_suffix('|')?;
        Some(inner.split('|').map(|cell| cell.trim().to_owned()).collect::<Vec<_>>())
    };
    let mut rows = text.lines().filter_map(cells);
    let columns: Vec<_> =
        rows.next().context("no table")?.iter().skip(2).map(|name| Column::new(name)).collect();
    let mut record = Record::default();
    for row in rows.skip(1) {
        let [program, mode, costs @ ..] = row.as_slice() else { bail!("a short row") };
        for (column, cell) in columns.iter().zip(costs).filter(|(_, cell)| !cell.is_empty()) {
            if program == "release" {
                record.releases.insert(column.clone(), cell.clone());
                continue;
            }
            let cost = read_cost(cell).with_context(|| format!("{program}, {}: {cell:?}", column.1))?;
            let load = (program.clone(), mode.clone());
            record.loads.entry(load).or_default().insert(column.clone(), cost);
        }
    }
    Ok(record)
}

fn read_cost(cell: &str) -> Result<Cost> {
    if cell == "-" {
        return Ok(None);
    }
    let mut parts = cell.split(" / ");
    let mut number = || parts.next().context("too few numbers");
    let (instructions, frame) = (number()?.parse()?, number()?.parse()?);
    // Without the point, the time is in tenths of a millisecond.
    let time: u64 = number()?.replace('.', "").parse()?;
    Ok(Some([instructions, frame, time * 100]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(kernel: &str, instructions: u64) -> Found {
        let lines = [
            format!("{MARK}tc_ingress\t\t{instructions}\t88\t1234"),
            format!("{MARK}tc_ingress\tno header, no new flows\t{instructions}\t88\t1234"),
            format!("{MARK}xdp_ingress\t\t-"),
        ];
        Found::read(kernel, "6.1.0-56-amd64", &lines).unwrap()
    }

    #[test]
    fn a_tenth_more_is_refused_and_less_is_not() {
        let mut record = Record::default();
        record.put(found("6.1", 1000));
        for (instructions, passes) in [(10, true), (1000, true), (1100, true), (1101, false)] {
            assert_eq!(record.check(&found("6.1", instructions)).is_ok(), passes, "{instructions}");
        }
        let error = record.check(&found("6.1", 2000)).unwrap_err().to_string();
        assert!(
            error.contains("tc_ingress (no header, no new flows) needs 2000 instructions instead of 1000"),
            "{error}"
        );
    }

    #[test]
    fn a_program_that_is_not_taken_any_more_is_told() {
        let mut record = Record::default();
        record.put(found("6.1", 1000));
        let mut less = found("6.1", 1000);
        less.loads.insert(("tc_ingress".into(), String::new()), None);
        assert!(record.check(&less).unwrap_err().to_string().contains("the kernel rejects tc_ingress now"));
    }

    #[test]
    fn what_is_written_is_read_again() {
        let mut record = Record::default();
        for kernel in ["sid", "6.12", "6.1", "6.1 aarch64", "5.15"] {
            record.put(found(kernel, 1000));
        }
        let text = record.render();
        assert!(text.contains("| program | mode | 5.15 | 6.1 | 6.1 aarch64 | 6.12 | sid |"), "{text}");
        assert!(text.contains("| 1000 / 88 / 1.2 |"), "{text}");
        let read = parse(&text).unwrap();
        assert_eq!(read.render(), text);
        read.check(&found("6.12", 1000)).unwrap();
    }

    #[test]
    fn lines_that_are_not_understood_are_an_error() {
        for line in ["verified\tx", "verified\tx\t\t1\t2", "verified\tx\t\ta\tb\tc"] {
            assert!(Found::read("6.1", "", &[line.to_owned()]).is_err(), "{line}");
        }
    }
}
