//! `ballast downgrade`.

use std::time::Duration;

use super::bpffs::BpffsArgs;
use crate::config::value;

/// `ballast downgrade`.
#[derive(Clone, Debug, clap::Args)]
pub struct DowngradeArgs {
    /// Its maps.
    #[command(flatten)]
    pub maps: BpffsArgs,
    /// The layout of the maps that the other version reads: the number in `<bpffs>/ballast/v2`. Only the one before this
    /// version's is known.
    #[arg(long, env = "BALLAST_TO_ABI", value_name = "NUMBER", default_value_t = 2, value_parser = clap::value_parser!(u32).range(2..=2))]
    pub to_abi: u32,
    /// Copy new connections for so long, until the other version's programs are attached.
    #[arg(long, env = "BALLAST_WAIT", value_name = "DURATION", default_value = "10m", value_parser = value::duration)]
    pub wait: Duration,
}
