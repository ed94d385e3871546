//! `ballast sysdump`: writes an archive with the data that a fault report needs.
//!
//! Each part is a file. A part that cannot be made is a line in `failures.txt`, and does not affect the other parts. All text
//! passes [`secrets::left_out`].

mod parts;
pub(super) mod secrets;

use std::fmt::Write as _;
use std::io::{self, Write};
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use flate2::Compression;
use flate2::write::GzEncoder;

use proxy_cli::archive::{SysdumpError, append, output};
use proxy_core::model::plural::plural;

use self::parts::Part;
use proxy_cli::args::change::SysdumpArgs;

/// The archive, from which secrets are removed.
struct Archive<W: Write> {
    tar: tar::Builder<GzEncoder<W>>,
    folder: String,
    time: u64,
    failures: String,
    files: usize,
}

impl<W: Write> Archive<W> {
    fn new(out: W, folder: String, time: u64) -> Self {
        let tar = tar::Builder::new(GzEncoder::new(out, Compression::default()));
        Self { tar, folder, time, failures: String::new(), files: 0 }
    }

    fn add(&mut self, (name, content): Part) -> io::Result<()> {
        match content {
            Ok(content) => {
                // A part that is not text is of no use to the reader of the archive.
                let Ok(text) = String::from_utf8(content) else {
                    self.fail(&name, "not valid text");
                    return Ok(());
                };
                self.write(&name, secrets::left_out(&text).as_bytes())
            }
            Err(reason) => {
                self.fail(&name, &reason);
                Ok(())
            }
        }
    }

    fn fail(&mut self, name: &str, reason: &str) {
        let reason = secrets::left_out(reason);
        // Writing to a `String` cannot fail.
        let _ = writeln!(self.failures, "{name}: {reason}");
    }

    fn write(&mut self, name: &str, content: &[u8]) -> io::Result<()> {
        self.files += 1;
        append(&mut self.tar, &format!("{}/{name}", self.folder), self.time, content)
    }

    /// Ends the archive. Returns the number of its files, and the failures.
    fn finish(mut self) -> io::Result<(usize, String)> {
        let failures = std::mem::take(&mut self.failures);
        if !failures.is_empty() {
            self.write("failures.txt", failures.as_bytes())?;
        }
        let files = self.files;
        self.tar.into_inner()?.finish()?.flush()?;
        Ok((files, failures))
    }
}

/// Writes the archive. Returns what was done, in words. `check` returns the result of `ballast check -o json`.
pub fn run(
    args: &SysdumpArgs,
    check: impl FnOnce() -> Result<String, String>,
) -> Result<String, SysdumpError> {
    let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let folder = format!("ballast-sysdump-{}-{time}", host.trim());
    let path = args.file.clone().unwrap_or_else(|| PathBuf::from(format!("{folder}.tar.gz")));
    let failed = |source| SysdumpError::File { path: path.clone(), source };
    let mut archive = Archive::new(output(&path)?, folder, time);
    parts::all(args, check, &mut |part| archive.add(part)).map_err(failed)?;
    let (files, failures) = archive.finish().map_err(failed)?;
    let missing = if failures.is_empty() {
        String::new()
    } else {
        format!("; {} failed, see failures.txt", plural(failures.lines().count(), "part"))
    };
    Ok(format!("{}: {}{missing}\n", path.display(), plural(files, "file")))
}

#[cfg(test)]
mod tests;
