//! Ballast's files for a cluster: the program for each node, and the image for the proxy `ballast`.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

use super::proxy::Proxy;
use crate::workspace::Workspace;
use crate::{build, image};

/// Which Ballast; what is not given is built.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct Given {
    /// Use this `ballast` instead of building one
    #[arg(long, value_name = "FILE")]
    pub ballast: Option<PathBuf>,
    /// For the proxy `ballast`: use this archive of `cargo xtask image` instead of building one
    #[arg(long, value_name = "ARCHIVE")]
    pub image: Option<PathBuf>,
    /// For the proxy `ballast`: build the image with optimisations, like the released one (takes minutes)
    #[arg(long, conflicts_with = "image")]
    pub release: bool,
}

/// Ballast's files, built or given.
#[derive(Clone, Debug)]
pub struct Ballast {
    /// The program.
    pub program: PathBuf,
    /// Archive with the image that the chart uses; only for the proxy that needs it.
    pub image: Option<PathBuf>,
}

/// Archive of the image, and the program in it if this command built it.
struct Image {
    archive: PathBuf,
    program: Option<PathBuf>,
}

impl Given {
    /// Returns the program and, if this proxy needs it, the image; builds what was not given.
    pub fn complete(&self, workspace: &Workspace, proxy: Proxy) -> Result<Ballast> {
        let image = self.image(workspace, proxy)?;
        let built = image.as_ref().and_then(|image| image.program.clone());
        let program = match (&self.ballast, built) {
            (Some(file), _) => there(file)?,
            (None, Some(program)) => program,
            (None, None) => {
                let args = build::Args::default();
                build::bpf(workspace, &args)?;
                build::agent(workspace, &args)?
            }
        };
        Ok(Ballast { program, image: image.map(|image| image.archive) })
    }

    /// Returns the archive of the image if this proxy needs one.
    pub fn archive(&self, workspace: &Workspace, proxy: Proxy) -> Result<Option<PathBuf>> {
        Ok(self.image(workspace, proxy)?.map(|image| image.archive))
    }

    fn image(&self, workspace: &Workspace, proxy: Proxy) -> Result<Option<Image>> {
        if proxy != Proxy::Ballast {
            return Ok(None);
        }
        if let Some(file) = &self.image {
            return Ok(Some(Image { archive: there(file)?, program: None }));
        }
        let folder = workspace.target().join("cluster-image");
        let made = image::make(workspace, &image::Args::into_folder(folder, !self.release))?;
        Ok(Some(Image { archive: made.archive, program: Some(made.binary) }))
    }
}

fn there(file: &Path) -> Result<PathBuf> {
    file.canonicalize().with_context(|| format!("no file {}", file.display()))
}
