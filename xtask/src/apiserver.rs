//! kube-apiserver and etcd for the `apiserver` tests, built once from pinned Go modules.
//!
//! The pins are `xtask/tools/*/go.mod`; what is built goes to `<cache>/tools/<name>-<version>`.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow};

use crate::exec::Cmd;
use crate::workspace::{self, Workspace};
use crate::{go, say};

/// Environment variables that name ready binaries; also how the tests are told.
pub const VARIABLES: [&str; 2] = ["BALLAST_KUBE_APISERVER", "BALLAST_ETCD"];

/// How often a long build says that it is still alive.
const HEARTBEAT: Duration = Duration::from_secs(30);

/// A program of a Go module, and the folder under `xtask/tools` that pins it.
struct Tool {
    name: &'static str,
    module: &'static str,
    package: &'static str,
    folder: &'static str,
}

const TOOLS: [Tool; 2] = [
    Tool {
        name: "kube-apiserver",
        module: "k8s.io/kubernetes",
        package: "k8s.io/kubernetes/cmd/kube-apiserver",
        folder: "apiserver",
    },
    Tool {
        name: "etcd",
        module: "go.etcd.io/etcd/server/v3",
        package: "go.etcd.io/etcd/server/v3",
        folder: "etcd",
    },
];

/// The two programs.
#[derive(Clone, Debug)]
pub struct Binaries {
    /// kube-apiserver.
    pub kube_apiserver: PathBuf,
    /// etcd.
    pub etcd: PathBuf,
}

impl Binaries {
    /// The environment that tells the tests where they are.
    pub fn environment(&self) -> [(&'static str, &Path); 2] {
        [(VARIABLES[0], &self.kube_apiserver), (VARIABLES[1], &self.etcd)]
    }
}

/// A build on its way, in the background.
#[derive(Debug)]
pub struct Pending {
    result: mpsc::Receiver<Result<Binaries>>,
    start: Instant,
}

/// Starts the build: it takes minutes the first time, so callers do other work meanwhile.
pub fn start(workspace: &Workspace) -> Pending {
    let (sender, result) = mpsc::channel();
    let workspace = workspace.clone();
    std::thread::spawn(move || {
        // Nobody listens any more when the command ended early.
        let _ = sender.send(build(&workspace));
    });
    Pending { result, start: Instant::now() }
}

impl Pending {
    /// Waits for it, and says so now and then.
    pub fn wait(self) -> Result<Binaries> {
        loop {
            match self.result.recv_timeout(HEARTBEAT) {
                Ok(done) => return done,
                Err(mpsc::RecvTimeoutError::Timeout) => {
                    let time = say::seconds(self.start.elapsed());
                    say::line(format_args!("    the API server is still being built, {time} so far"));
                }
                Err(mpsc::RecvTimeoutError::Disconnected) => {
                    return Err(anyhow!("the build of the API server died"));
                }
            }
        }
    }
}

/// Finds or builds both programs; a second caller waits for the first.
pub fn build(workspace: &Workspace) -> Result<Binaries> {
    let given =
        VARIABLES.map(|name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from));
    if let [Some(kube_apiserver), Some(etcd)] = given {
        return Ok(Binaries { kube_apiserver, etcd });
    }
    let tools = workspace::cache()?.join("tools");
    fs::create_dir_all(&tools).with_context(|| format!("cannot make {}", tools.display()))?;
    let lock = File::create(tools.join("lock")).context("cannot make the lock file of the tools")?;
    lock.lock().context("cannot take the lock of the tools")?;
    // etcd first: it is small, and a Go that does not work shows soon.
    let etcd = one(workspace, &tools, &TOOLS[1])?;
    let kube_apiserver = one(workspace, &tools, &TOOLS[0])?;
    Ok(Binaries { kube_apiserver, etcd })
}

fn one(workspace: &Workspace, tools: &Path, tool: &Tool) -> Result<PathBuf> {
    let folder = workspace.root().join("xtask/tools").join(tool.folder);
    let pins =
        fs::read_to_string(folder.join("go.mod")).with_context(|| format!("no go.mod for {}", tool.name))?;
    let version =
        pinned(&pins, tool.module).with_context(|| format!("go.mod does not pin {}", tool.module))?;
    let binary = tools.join(format!("{}-{version}", tool.name));
    if binary.exists() {
        return Ok(binary);
    }
    let go = go::find_or_install()?;
    let start = Instant::now();
    say::step(format_args!("build {} {version} from its Go modules, once (minutes)", tool.name));
    let unfinished = tools.join(format!("{}-{version}.unfinished", tool.name));
    // Nice: whatever runs beside it is what somebody waits for.
    let build = Cmd::new("nice").args(["-n", "10"]).arg(&go).args(["build", "-mod=readonly", "-trimpath"]);
    build
        .args(["-ldflags", "-s -w", "-o"])
        .arg(&unfinished)
        .arg(tool.package)
        .env("CGO_ENABLED", "0")
        .env("GOWORK", "off")
        // It would send a fetched release to another one's library.
        .without_env("GOROOT")
        .dir(&folder)
        .read()?;
    fs::rename(&unfinished, &binary).with_context(|| format!("cannot rename {}", unfinished.display()))?;
    say::line(format_args!("    {} {version}: {}", tool.name, say::seconds(start.elapsed())));
    Ok(binary)
}

/// The version that a go.mod requires of a module.
fn pinned<'a>(go_mod: &'a str, module: &str) -> Option<&'a str> {
    go_mod.lines().filter(|line| !line.contains("=>")).find_map(|line| {
        let mut words = line.trim().trim_start_matches("require ").split_whitespace();
        (words.next()? == module).then(|| words.next()).flatten()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_comes_from_the_requirement() {
        let text = "module x\nrequire (\n\ta/b v1.2.3 // indirect\n)\nrequire c/d v2.0.0\nreplace e/f => e/f v3.0.0\n";
        assert_eq!(pinned(text, "a/b"), Some("v1.2.3"));
        assert_eq!(pinned(text, "c/d"), Some("v2.0.0"));
        assert_eq!(pinned(text, "e/f"), None);
    }

    #[test]
    fn every_tool_is_pinned_in_the_project() {
        for tool in TOOLS {
            let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tools").join(tool.folder).join("go.mod");
            let text = fs::read_to_string(file).unwrap();
            assert!(
                pinned(&text, tool.module).is_some_and(|version| version.starts_with('v')),
                "{}",
                tool.name
            );
            assert!(text.contains(&format!("tool {}", tool.package)), "{}", tool.name);
        }
    }
}
