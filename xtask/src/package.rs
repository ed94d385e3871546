//! `cargo xtask release package`: builds a deb and an rpm of the static agent, with units, settings, manual pages and completions.
//!
//! `proxy-user/Cargo.toml` lists the files in them (`package.metadata.deb`, `package.metadata.generate-rpm`); the program and
//! generated files are put into target/package first.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use fs_err as fs;

use crate::cross::Arch;
use crate::exec::{self, Cmd};
use crate::image::binary;
use crate::setup::{self, Need};
use crate::workspace::Workspace;
use crate::{build, cargotools, log};

/// Build a deb and an rpm package: the static agent, systemd units, an initial configuration, manual pages, completions. A
/// separate file has the debug information.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct Args {
    /// Folder for the packages [default: target/package]
    #[arg(long, value_name = "DIR")]
    pub output: Option<PathBuf>,
    /// Package this program instead of building one
    #[arg(long, value_name = "FILE")]
    pub program: Option<PathBuf>,
    /// The architecture of the program
    #[arg(long, value_enum, default_value_t)]
    pub target: Arch,
    /// Build the agent without optimisations, for tests of the packages
    #[arg(long)]
    pub dev: bool,
}

/// Path of the program in the repository's units, and in a package.
const PROGRAM: [&str; 2] = ["/usr/local/bin/ballast", "/usr/bin/ballast"];
/// Name of the program in target/package.
const NAME: &str = "ballast";
const UNITS: [&str; 2] = ["ballast.service", "ballast-end-udp-sockets.service"];

/// Files that a package must contain.
const HOLDS: [&str; 10] = [
    "/usr/bin/ballast",
    "/usr/lib/systemd/system/ballast.service",
    "/usr/lib/systemd/system/ballast-end-udp-sockets.service",
    "/etc/ballast/config.yaml",
    "/etc/ballast/environment",
    "/usr/share/man/man1/ballast.1",
    "/usr/share/man/man1/ballast-service-list.1",
    "/usr/share/bash-completion/completions/ballast",
    "/usr/share/zsh/vendor-completions/_ballast",
    "/usr/share/fish/vendor_completions.d/ballast.fish",
];

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    let workspace = Workspace::find()?;
    let program = if let Some(program) = &args.program {
        program.clone()
    } else {
        setup::tools(Need::Image)?;
        build::bpf(&workspace, &build::Args::default())?;
        binary::build(&workspace, args.target, args.dev)?
    };
    for path in make(&workspace, args.target, &program, args.output.as_deref())? {
        let size = fs::metadata(&path)?.len();
        log::line(format_args!("{} ({} MB)", path.display(), size / 1_000_000));
    }
    Ok(())
}

/// Makes both packages of a program, and returns their paths and that of the file with the debug information.
pub fn make(
    workspace: &Workspace,
    arch: Arch,
    program: &Path,
    output: Option<&Path>,
) -> Result<Vec<PathBuf>> {
    // proxy-user/Cargo.toml names this folder.
    let stage = workspace.root().join("target/package");
    let folder = output.map_or_else(|| stage.clone(), Path::to_owned);
    fs::create_dir_all(&folder)?;
    put_together(workspace, arch, program, &stage)?;
    let deb = log::timed("make the deb", || deb(workspace, arch, &folder))?;
    let rpm = log::timed("make the rpm", || rpm(workspace, arch, &folder))?;
    let debug = folder.join(format!("ballast-{}-{}.debug", env!("CARGO_PKG_VERSION"), arch.debian()));
    fs::copy(binary::debug_of(&stage.join(NAME)), &debug)?;
    Ok(vec![deb, rpm, debug])
}

/// Puts the files that proxy-user/Cargo.toml names into one folder.
fn put_together(workspace: &Workspace, arch: Arch, program: &Path, stage: &Path) -> Result<()> {
    let units = stage.join("units");
    fs::create_dir_all(&units)?;
    let staged = stage.join(NAME);
    fs::copy(program, &staged)?;
    let debug = binary::debug_of(program);
    if debug.exists() {
        fs::copy(debug, binary::debug_of(&staged))?;
    } else {
        binary::split(&staged, arch)?;
    }
    for unit in UNITS {
        let from = workspace.root().join("deploy/systemd").join(unit);
        let text = fs::read_to_string(&from)?;
        ensure!(text.contains(PROGRAM[0]), "{unit} does not name {}", PROGRAM[0]);
        fs::write(units.join(unit), text.replace(PROGRAM[0], PROGRAM[1]))?;
    }
    // The program writes its manual pages itself.
    let host =
        if arch == Arch::HOST { None } else { Some(build::agent(workspace, &build::Args::default())?) };
    write_share(host.as_deref().unwrap_or(program), &stage.join("share"))
}

fn deb(workspace: &Workspace, arch: Arch, folder: &Path) -> Result<PathBuf> {
    let said = cargotools::cargo(cargotools::DEB)?
        .args(["--no-build", "--no-strip", "--target", arch.target(), "--package", "proxy-user", "--output"])
        .arg(folder)
        .dir(workspace.root())
        .read()?;
    let is_deb = |line: &&str| Path::new(line).extension().is_some_and(|extension| extension == "deb");
    let path = said.lines().map(str::trim).find(is_deb);
    let path = PathBuf::from(
        path.with_context(|| format!("cargo deb does not print the name of its file: {said}"))?,
    );
    let listed = Cmd::new("dpkg-deb").arg("--contents").arg(&path).read()?;
    // In a deb, manual pages are compressed, and a path begins with a dot.
    holds(&listed.replace(" ./", " /").replace(".1.gz", ".1")).with_context(|| path.display().to_string())?;
    Ok(path)
}

fn rpm(workspace: &Workspace, arch: Arch, folder: &Path) -> Result<PathBuf> {
    let architecture = arch.to_string();
    let path = folder.join(format!("ballast-{}-1.{architecture}.rpm", env!("CARGO_PKG_VERSION")));
    cargotools::cargo(cargotools::RPM)?
        .args(["--package", "proxy-user", "--auto-req", "disabled", "--arch", &architecture, "--output"])
        .arg(&path)
        .dir(workspace.root())
        .run()?;
    // Machines on which debs are made seldom have rpm(8).
    if exec::which("rpm").is_some() {
        let listed = Cmd::new("rpm").args(["--query", "--list", "--package"]).arg(&path).read()?;
        holds(&listed).with_context(|| path.display().to_string())?;
    } else {
        log::line("    note: no rpm(8) here to list what is in the package");
    }
    Ok(path)
}

/// Returns an error if a list of files lacks a file that a package must contain.
fn holds(listed: &str) -> Result<()> {
    let is_there = |path: &str| listed.lines().any(|line| line.split_whitespace().any(|word| word == path));
    let lost: Vec<_> = HOLDS.into_iter().filter(|path| !is_there(path)).collect();
    ensure!(lost.is_empty(), "missing in the package: {}", lost.join(", "));
    Ok(())
}

/// The shells, and the files in which they look for completions of `ballast`.
const COMPLETIONS: [(&str, &str); 3] = [
    ("bash", "bash-completion/completions/ballast"),
    ("zsh", "zsh/vendor-completions/_ballast"),
    ("fish", "fish/vendor_completions.d/ballast.fish"),
];

/// Writes the files for /usr/share that the program itself generates below `folder`, which is emptied first.
pub fn write_share(program: &Path, folder: &Path) -> Result<()> {
    if folder.exists() {
        fs::remove_dir_all(folder)?;
    }
    let manuals = folder.join("man/man1");
    fs::create_dir_all(&manuals)?;
    Cmd::new(program).arg("man").arg(&manuals).run()?;
    for (shell, file) in COMPLETIONS {
        let script = Cmd::new(program).args(["completion", shell]).read()?;
        let path = folder.join(file);
        let parent = path.parent().context("a completion has a folder")?;
        fs::create_dir_all(parent)?;
        fs::write(&path, script)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    /// Returns the section `package.metadata` of `proxy-user/Cargo.toml`.
    fn metadata() -> Value {
        let workspace = Workspace::find().unwrap();
        let text = Cmd::cargo()
            .args(["metadata", "--no-deps", "--offline", "--format-version=1"])
            .dir(workspace.root())
            .read()
            .unwrap();
        let all: Value = serde_json::from_str(&text).unwrap();
        let packages = all["packages"].as_array().unwrap();
        packages.iter().find(|one| one["name"] == "proxy-user").unwrap()["metadata"].clone()
    }

    /// Returns source and destination of each file of a package.
    fn assets(kind: &str) -> Vec<(String, String)> {
        let metadata = metadata();
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let asset = |one: &Value| match one {
            Value::Array(all) => (text(&all[0]), text(&all[1])),
            one => (text(&one["source"]), text(&one["dest"])),
        };
        metadata[kind]["assets"].as_array().unwrap().iter().map(asset).collect()
    }

    #[test]
    fn both_packages_put_the_same_files_into_the_same_places() {
        let places = |kind: &str| {
            let assets = assets(kind);
            let mut places: Vec<_> =
                assets.into_iter().map(|(_, to)| to.trim_start_matches('/').to_owned()).collect();
            places.sort();
            places
        };
        assert_eq!(places("deb"), places("generate-rpm"));
    }

    #[test]
    fn every_file_is_in_the_repository_or_is_made() {
        let root = Workspace::find().unwrap().root().to_owned();
        for (kind, base) in [("deb", "proxy-user"), ("generate-rpm", "proxy-user")] {
            for (source, _) in assets(kind) {
                let is_made = source.contains("target/package/");
                assert!(is_made || root.join(base).join(&source).exists(), "{kind}: {source}");
            }
        }
    }

    /// Runs the script of a removal, with all its paths below a folder, and returns what a fake of the program saw.
    fn removed(environment: &str, pins: &str) -> String {
        use std::os::unix::fs::PermissionsExt as _;
        let script = include_str!("../../deploy/package/scripts/prerm");
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        let below = |text: &str| {
            let paths = ["/etc/ballast", "/sys/fs/bpf", "/usr/bin/ballast", "/run/systemd", "/run/own"];
            let moved = |text: String, path: &str| text.replace(path, &format!("{}{path}", root.display()));
            paths.into_iter().fold(text.to_owned(), moved)
        };
        for folder in [below("/etc/ballast"), below(pins), root.join("usr/bin").display().to_string()] {
            fs::create_dir_all(folder).unwrap();
        }
        fs::write(below("/etc/ballast/environment"), below(environment)).unwrap();
        let program = below("/usr/bin/ballast");
        fs::write(&program, "#!/bin/sh\necho \"$*|$BALLAST_BPFFS|$BALLAST_CGROUP_ROOT\"\n").unwrap();
        fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        let prerm = root.join("prerm");
        fs::write(&prerm, below(script)).unwrap();
        let printed = Cmd::new("/bin/sh")
            .arg(&prerm)
            .arg("remove")
            .without_env("BALLAST_BPFFS")
            .without_env("BALLAST_CGROUP_ROOT")
            .read()
            .unwrap();
        printed.replace(&root.display().to_string(), "").trim_end().to_owned()
    }

    #[test]
    fn a_removal_cleans_the_folders_of_the_agents_settings() {
        assert_eq!(removed("# A=b\n", "/sys/fs/bpf/ballast"), "cleanup --yes||");
        assert_eq!(removed("BALLAST_BPFFS=/run/own\n", "/run/own/ballast"), "cleanup --yes|/run/own|");
        let both = "#BALLAST_BPFFS=/no\nBALLAST_BPFFS=/no\nBALLAST_LOG_LEVEL=a b $(c)\n BALLAST_BPFFS=\"/run/own x\"  \nBALLAST_CGROUP_ROOT='/run/own/c'\n";
        assert_eq!(removed(both, "/run/own x/ballast"), "cleanup --yes|/run/own x|/run/own/c");
        assert_eq!(removed("BALLAST_BPFFS=/run/own\n", "/sys/fs/bpf/ballast"), "");
    }
}
