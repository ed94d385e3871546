//! Files for /usr/share in the image and the packages that the program itself generates: manual pages and completions.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};

use crate::exec::Cmd;

/// The shells, and the files in which they look for completions of `ballast`.
const COMPLETIONS: [(&str, &str); 3] = [
    ("bash", "bash-completion/completions/ballast"),
    ("zsh", "zsh/vendor-completions/_ballast"),
    ("fish", "fish/vendor_completions.d/ballast.fish"),
];

/// Writes the files below `folder`, which is emptied first.
pub fn write(program: &Path, folder: &Path) -> Result<()> {
    if folder.exists() {
        fs::remove_dir_all(folder).with_context(|| format!("cannot remove {}", folder.display()))?;
    }
    let manuals = folder.join("man/man1");
    fs::create_dir_all(&manuals).with_context(|| format!("cannot make {}", manuals.display()))?;
    Cmd::new(program).arg("man").arg(&manuals).run()?;
    for (shell, file) in COMPLETIONS {
        let script = Cmd::new(program).args(["completion", shell]).read()?;
        let path = folder.join(file);
        let parent = path.parent().context("a completion has a folder")?;
        fs::create_dir_all(parent).with_context(|| format!("cannot make {}", parent.display()))?;
        fs::write(&path, script).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}
