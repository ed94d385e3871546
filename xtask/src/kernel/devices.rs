//! `cargo xtask test devices`: tests Services over each kind of network device (`xtask/tools/devices.sh`).

use std::path::PathBuf;

use anyhow::Result;
use fs_err as fs;

use super::{Programs, RUNNING};
use crate::cluster::faults::page;
use crate::cross::Arch;
use crate::exec::{self, Cmd};
use crate::log;
use crate::workspace::Workspace;

const PAGE: &str = "docs/datapath.md";
/// Prefix of the script's output lines that belong to the table.
const ROW: &str = "row: ";

/// Test Services over each kind of network device of a kernel: devices on the way to other nodes, tunnels, devices of pods.
/// docs/datapath.md has the results.
#[derive(clap::Args, Clone, Debug)]
pub struct Args {
    /// Boot the newest kernel of this series in qemu: 6.1, 6.12, sid; `running`: the kernel of this machine, without qemu
    #[arg(long, value_name = "LINE", default_value = RUNNING)]
    pub kernel: String,
    /// Root folder of a machine whose apt sources have that kernel's distribution
    #[arg(long, value_name = "DIR", default_value = "/")]
    pub apt_root: PathBuf,
    /// Write the results into docs/datapath.md
    #[arg(long)]
    pub record: bool,
    /// Test only these devices, by the words of the table (`VXLAN`)
    pub devices: Vec<String>,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    let workspace = Workspace::find()?;
    let programs = Programs::build(&workspace, Arch::HOST)?;
    let (release, console) = if args.kernel == RUNNING {
        exec::require_root("load programs and make network namespaces", "test devices ...")?;
        let said = Cmd::new("bash")
            .args(["-o", "pipefail", "-c", r#""$0" "$@" | tee /dev/stderr"#])
            .arg(workspace.root().join(super::DEVICES_SCRIPT))
            .args([&programs.agent, &programs.tests])
            .args(&args.devices)
            .read_with_stderr_shown()?;
        let release = Cmd::new("uname").arg("-r").read()?;
        (release, said.lines().map(str::to_owned).collect())
    } else {
        programs.boot(&workspace, &args.kernel, Arch::HOST, &args.apt_root, Some(&args.devices.join("\n")))?
    };
    if !args.record {
        return Ok(());
    }
    let path = workspace.root().join(PAGE);
    let old = fs::read_to_string(&path)?;
    fs::write(&path, page::replaced(&old, "devices", &table(&release, &console)))?;
    log::line(format_args!("written: {PAGE}"));
    Ok(())
}

/// Returns the table of a run.
fn table(release: &str, console: &[String]) -> String {
    let rows = console.iter().filter_map(|line| line.trim_start().strip_prefix(ROW));
    let rows: Vec<_> = rows.map(|row| format!("| {} |\n", row.replace('|', " | "))).collect();
    format!(
        "Linux {}:\n\n| device | pod, sockets | pod, packets | node, sockets | node, packets | outside | not served, because |\n\
         |---|---|---|---|---|---|---|\n{}",
        release.trim().split('-').next().unwrap_or_default(),
        rows.concat()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_rows_of_the_script_are_in_the_table() {
        let console = ["booted", "row: VLAN|yes|no|yes|yes|yes|a reason", "absent: team"].map(str::to_owned);
        let table = table("6.12.1-amd64\n", &console);
        assert!(table.starts_with("Linux 6.12.1:\n"));
        assert!(table.ends_with("|---|\n| VLAN | yes | no | yes | yes | yes | a reason |\n"), "{table}");
    }
}
