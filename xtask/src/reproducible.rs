//! `cargo xtask reproducible`: checks that the same commit gives the same program in any folder.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};

use crate::cross::Arch;
use crate::exec::Cmd;
use crate::image::binary;
use crate::workspace::Workspace;
use crate::{build, log};

/// Build the release program twice from the last commit, in two folders with names of different length, and compare both
/// programs and their BPF objects (takes minutes).
#[derive(clap::Args, Clone, Copy, Debug, Default)]
pub struct Args {
    /// Keep both folders, to examine a difference
    #[arg(long)]
    pub keep: bool,
}

/// Folders of the two builds, below target/reproducible.
const PLACES: [&str; 2] = ["one", "another-folder/with-a-longer-name"];

/// Runs the command.
pub fn run(args: Args) -> Result<()> {
    let workspace = Workspace::find()?;
    let folder = workspace.target().join("reproducible");
    remove(&folder)?;
    let mut sums = Vec::new();
    for place in PLACES {
        let made = log::timed(&format!("build in {place}"), || {
            let copy = copy(&workspace, &folder.join(place))?;
            build::bpf(&copy, &build::Args::default())?;
            let program = binary::build(&copy, Arch::HOST, false)?;
            Ok([("BPF object", sum(&copy.bpf_object())?), ("program", sum(&program)?)])
        })?;
        for (what, sum) in &made {
            log::line(format_args!("{sum}  {what}, built in {place}"));
        }
        sums.push(made);
    }
    if sums.first() != sums.last() {
        bail!("the two builds differ; --keep keeps them in {}", folder.display());
    }
    if !args.keep {
        remove(&folder)?;
    }
    log::line("reproducible: both builds are equal");
    Ok(())
}

/// Copies the files of the last commit into a folder.
fn copy(workspace: &Workspace, folder: &Path) -> Result<Workspace> {
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let archive = folder.with_extension("tar");
    let git = Cmd::new("git").args(["archive", "--format=tar", "-o"]).arg(&archive).arg("HEAD");
    git.dir(workspace.root()).run()?;
    Cmd::new("tar").arg("-xf").arg(&archive).arg("-C").arg(folder).run()?;
    Ok(Workspace::at(PathBuf::from(folder)))
}

fn sum(file: &Path) -> Result<String> {
    let told = Cmd::new("sha256sum").arg(file).read()?;
    told.split_whitespace().next().map(str::to_owned).context("sha256sum printed nothing")
}

fn remove(folder: &Path) -> Result<()> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", folder.display()))
        }
        _ => Ok(()),
    }
}
