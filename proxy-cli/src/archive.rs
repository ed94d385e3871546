//! Archives of `ballast sysdump` and `kubectl ballast sysdump`.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Why there is no archive.
#[derive(Debug, thiserror::Error)]
pub enum SysdumpError {
    /// The file cannot be written.
    #[error("cannot write {}: {source}; give another file, or - for standard output", path.display())]
    File {
        /// Path of the file.
        path: PathBuf,
        /// Cause of the failure.
        source: io::Error,
    },
    /// The archive would be written to a terminal.
    #[error("standard output is a terminal: give a file name, or redirect standard output")]
    Terminal,
}

/// Appends a file that only its owner may read; `time`: its modification, in seconds since 1970.
pub fn append<W: Write>(tar: &mut tar::Builder<W>, path: &str, time: u64, content: &[u8]) -> io::Result<()> {
    let mut header = tar::Header::new_gnu();
    header.set_size(content.len() as u64);
    header.set_mode(0o600);
    header.set_mtime(time);
    tar.append_data(&mut header, path, content)
}

/// Opens the file of an archive; `-`: standard output.
pub fn output(path: &Path) -> Result<Box<dyn Write>, SysdumpError> {
    if path.as_os_str() == "-" {
        if io::IsTerminal::is_terminal(&io::stdout()) {
            return Err(SysdumpError::Terminal);
        }
        return Ok(Box::new(io::stdout()));
    }
    let file = private(path).map_err(|source| SysdumpError::File { path: path.to_owned(), source })?;
    Ok(Box::new(file))
}

/// Creates or empties a file that only its owner may read, because the archive contains every address of the cluster. Windows has
/// no such mode: there, the folder decides who may read the file.
pub fn private(path: &Path) -> io::Result<File> {
    let mut options = File::options();
    options.write(true).create(true).truncate(true);
    #[cfg(unix)]
    {
        use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
        let file = options.mode(0o600).open(path)?;
        // `mode` applies to a new file only. A pipe or device keeps its mode.
        if file.metadata()?.is_file() {
            file.set_permissions(std::fs::Permissions::from_mode(0o600))?;
        }
        Ok(file)
    }
    #[cfg(not(unix))]
    options.open(path)
}
