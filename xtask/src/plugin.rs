//! The plugin of kubectl in a release: an archive for each system, and krew's manifest, which names the archives.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use fs_err as fs;

use crate::exec::Cmd;
use crate::image::binary::PLUGIN;
use crate::workspace::{Workspace, docs, repository};
use crate::{build, cross, log};

/// Rust's name of Windows with the C library of MinGW.
const WINDOWS: &str = "x86_64-pc-windows-gnu";

/// The plugin for a system.
#[derive(Debug)]
pub struct Plugin {
    /// As Go names it: `linux`, `darwin`, `windows`.
    os: &'static str,
    /// As Go names it: `amd64`, `arm64`.
    arch: &'static str,
    program: PathBuf,
}

impl Plugin {
    /// Returns the plugin for a system, whose names are those of Go.
    pub fn new(os: &'static str, arch: &'static str, program: PathBuf) -> Self {
        Self { os, arch, program }
    }

    /// Name of the program in the archive.
    fn name(&self) -> String {
        [PLUGIN, if self.os == "windows" { ".exe" } else { "" }].concat()
    }

    /// Writes the archive, and returns its checksum.
    fn write(&self, folder: &Path) -> Result<String> {
        let version = env!("CARGO_PKG_VERSION");
        let archive = folder.join(format!("{PLUGIN}-{version}-{}-{}.tar.gz", self.os, self.arch));
        let program = &self.program;
        let (home, file) = (program.parent().context("no folder")?, program.file_name().context("no name")?);
        // With these options, the same program gives an archive with the same bytes.
        Cmd::new("tar")
            .args(["--create", "--use-compress-program=gzip -n", "--mtime=@0", "--owner=0", "--group=0"])
            .args(["--numeric-owner", "--mode=0755", "--file"])
            .arg(&archive)
            .arg(format!("--transform=s,.*,{},", self.name()))
            .arg("--directory")
            .arg(home)
            .arg(file)
            .run()?;
        let sum = Cmd::new("sha256sum").arg(&archive).read()?;
        sum.split_whitespace().next().map(str::to_owned).context("no checksum")
    }
}

/// Builds the plugin for Windows.
pub fn windows(workspace: &Workspace) -> Result<Plugin> {
    cross::prepare_target(WINDOWS, "x86_64-w64-mingw32-gcc", &["gcc-mingw-w64-x86-64"])?;
    let cargo = Cmd::cargo()
        .args(["build", "--locked", "--release", "-p", "proxy-cli", "--bin", PLUGIN, "--target", WINDOWS])
        .arg("--target-dir")
        .arg(workspace.target())
        .dir(workspace.root())
        .env("CARGO_ENCODED_RUSTFLAGS", build::path_remap_flags(workspace).join("\x1f"))
        .env("CARGO_PROFILE_RELEASE_STRIP", "symbols");
    let cargo = docs().into_iter().fold(cargo, |cargo, docs| cargo.env("BALLAST_DOCS", docs));
    log::timed("build the plugin for Windows", || cargo.run())?;
    let program = workspace.target().join(WINDOWS).join("release").join(PLUGIN).with_extension("exe");
    Ok(Plugin::new("windows", "amd64", program))
}

/// Returns the plugins that a Mac has built into `target/plugin`: only a Mac has Apple's libraries.
pub fn of_mac(workspace: &Workspace) -> Vec<Plugin> {
    let built = ["amd64", "arm64"].map(|arch| {
        let program = workspace.target().join(format!("plugin/darwin-{arch}/{PLUGIN}"));
        Plugin::new("darwin", arch, program)
    });
    let (there, missing): (Vec<_>, Vec<_>) = built.into_iter().partition(|plugin| plugin.program.exists());
    for plugin in missing {
        log::line(format_args!(
            "no plugin for macOS on {}: {} is missing",
            plugin.arch,
            plugin.program.display()
        ));
    }
    there
}

/// Writes an archive for each system, and krew's manifest.
pub fn write(workspace: &Workspace, folder: &Path, plugins: &[Plugin]) -> Result<()> {
    let template = workspace.root().join("deploy/krew/ballast.yaml");
    let text = fs::read_to_string(&template)?;
    let text: String = text.split_inclusive('\n').filter(|line| !line.starts_with('#')).collect();
    let start = text.find("    - selector:").context("krew's manifest has no platform")?;
    let (mut all, platform) = (text[..start].to_owned(), &text[start..]);
    for plugin in plugins {
        let sum = plugin.write(folder)?;
        let values = [
            ("PLATFORM_OS", plugin.os),
            ("PLATFORM_ARCH", plugin.arch),
            ("SHA256", &sum),
            ("PROGRAM", &plugin.name()),
        ];
        all += &values.iter().fold(platform.to_owned(), |text, (name, value)| text.replace(name, value));
    }
    let repository = repository().unwrap_or_else(|| "OWNER/REPOSITORY".to_owned());
    let all = all.replace("VERSION", env!("CARGO_PKG_VERSION")).replace("REPOSITORY", &repository);
    Ok(fs::write(folder.join(format!("{PLUGIN}.yaml")), all)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn krews_manifest_names_each_archive_and_its_checksum() {
        let dir = tempfile::tempdir().unwrap();
        let systems = [("linux", "arm64"), ("darwin", "amd64"), ("windows", "amd64")];
        let plugins = systems.map(|(os, arch)| {
            let program = dir.path().join(os).join("program");
            fs::create_dir(program.parent().unwrap()).unwrap();
            fs::write(&program, os).unwrap();
            Plugin::new(os, arch, program)
        });
        let workspace = Workspace::find().unwrap();
        write(&workspace, dir.path(), &plugins).unwrap();
        let text = fs::read_to_string(dir.path().join("kubectl-ballast.yaml")).unwrap();
        let fields = |name: &'static str| {
            text.lines().filter_map(move |line| line.trim().strip_prefix(name)).collect()
        };
        for placeholder in ["SHA256", "VERSION", "PLATFORM", "PROGRAM"] {
            assert!(!text.contains(placeholder), "{text}");
        }
        let (uris, sums, bins): (Vec<_>, Vec<_>, Vec<_>) =
            (fields("uri: "), fields("sha256: "), fields("bin: "));
        assert_eq!([uris.len(), sums.len(), bins.len()], [3; 3], "{text}");
        for (at, (os, arch)) in systems.iter().enumerate() {
            assert!(uris[at].ends_with(&format!("-{os}-{arch}.tar.gz")), "{text}");
            let name = if *os == "windows" { "kubectl-ballast.exe" } else { "kubectl-ballast" };
            assert_eq!(bins[at], name, "{text}");
            let archive = dir.path().join(uris[at].rsplit('/').next().unwrap());
            let sum = Cmd::new("sha256sum").arg(&archive).read().unwrap();
            assert!(sum.starts_with(sums[at]), "{sum}: {text}");
            let content = Cmd::new("tar").arg("-xOf").arg(&archive).arg(bins[at]).read().unwrap();
            assert_eq!(content, *os);
            let first = fs::read(&archive).unwrap();
            write(&workspace, dir.path(), &plugins).unwrap();
            assert_eq!(first, fs::read(&archive).unwrap(), "another run gives another archive");
        }
    }
}
