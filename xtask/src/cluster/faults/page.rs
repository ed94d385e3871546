//! `docs/benchmarks/faults.md`: each run replaces its own part and keeps the others.

use anyhow::Result;
use fs_err as fs;

use crate::exec::Cmd;
use crate::log;
use crate::workspace::Workspace;

const PAGE: &str = "docs/benchmarks/faults.md";
const HEAD: &str = "\
# Faults

What connections saw while something went wrong on the [cluster of this machine](../testing.md#a-real-cluster). Each part is \
written by the commands that it names; `cargo xtask test cluster faults --help` explains the cases.

In the tables, NEW, LONG, UDP and AFFINITY count questions: each by a new TCP connection; by TCP connections that stay all the \
time; by UDP sockets, new ones and such that stay; by new connections to a Service with session affinity. FAILED are those \
without an answer, RESET of these the ones that a RST ended, SYNS AGAIN SYNs that were sent again (`TCP_INFO`), MOVED answers \
of another pod where it has to be the same. Five clients ask, over IPv4 and IPv6: a process of a node, a pod, another pod past \
the socket programs, and clients outside by the node ports of two nodes.
";

/// Writes a run's part into the page.
pub(super) fn write(part: &str, title: &str, commands: &[String], body: &str) -> Result<()> {
    let path = Workspace::find()?.root().join(PAGE);
    let old = fs::read_to_string(&path).unwrap_or_else(|_| HEAD.to_owned());
    let commands = commands.join("`, then `");
    let text = format!("## {title}\n\n`{commands}`, {}.\n\n{}\n", machine(), body.trim_end());
    fs::write(&path, replaced(&old, part, &text))?;
    log::line(format_args!("written: {PAGE}"));
    Ok(())
}

/// Describes what the figures depend on.
pub(super) fn machine() -> String {
    let cpus = std::thread::available_parallelism().map_or(0, usize::from);
    let kernel = Cmd::new("uname").arg("-r").try_read().unwrap_or_default();
    let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let load = load.split(' ').nth(1).unwrap_or("?").to_owned();
    let day = jiff::Timestamp::now().to_string();
    format!(
        "{}, {cpus} CPUs, Linux {}, mean load of the last five minutes {load}",
        day.split('T').next().unwrap_or_default(),
        kernel.trim().split('-').next().unwrap_or_default()
    )
}

/// Returns the page with this part in the place of the old one, or at the end.
pub fn replaced(page: &str, part: &str, text: &str) -> String {
    let (begin, end) = (format!("<!-- begin {part} -->\n"), format!("<!-- end {part} -->\n"));
    let whole = format!("{begin}{text}{end}");
    let old = page.find(&begin).zip(page.find(&end)).filter(|(from, to)| from < to);
    match old {
        Some((from, to)) => {
            let (before, after) = (page.get(..from), page.get(to + end.len()..));
            format!("{}{whole}{}", before.unwrap_or_default(), after.unwrap_or_default())
        }
        None => format!("{}\n{whole}", page.trim_end_matches('\n').to_owned() + "\n"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_replaces_its_own_and_nothing_else() {
        let one = replaced("# Head\n", "a", "first\n");
        let two = replaced(&one, "b", "second\n");
        let three = replaced(&two, "a", "third\n");
        assert!(
            two.contains("# Head\n\n<!-- begin a -->\nfirst\n<!-- end a -->\n\n<!-- begin b -->"),
            "{two}"
        );
        assert!(three.contains("third") && three.contains("second") && !three.contains("first"), "{three}");
        assert_eq!(replaced(&three, "a", "third\n"), three);
    }
}
