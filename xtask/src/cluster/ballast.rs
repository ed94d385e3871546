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
        let (program, image) = self.replacement(workspace, proxy)?;
        let program = match program {
            Some(program) => program,
            None => {
                let args = build::Args::default();
                build::bpf(workspace, &args)?;
                build::agent(workspace, &args)?
            }
        };
        Ok(Ballast { program, image })
    }

    /// Returns what replaces the files of a cluster that has a program: the given program or that of a new image, and the image
    /// if this proxy needs one.
    pub fn replacement(
        &self,
        workspace: &Workspace,
        proxy: Proxy,
    ) -> Result<(Option<PathBuf>, Option<PathBuf>)> {
        let image = self.image(workspace, proxy)?;
        let (archive, built) = image.map_or((None, None), |image| (Some(image.archive), image.program));
        let program = self.ballast.as_deref().map(there).transpose()?.or(built);
        Ok((program, archive))
    }

    /// Whether a file or a build was asked for.
    pub fn is_given(&self) -> bool {
        self.ballast.is_some() || self.image.is_some() || self.release
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
