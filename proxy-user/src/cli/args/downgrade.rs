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
    /// ABI version of the maps of the other version: the number in `<bpffs>/ballast/v2`. Only the ABI version directly before
    /// that of this program is supported.
    #[arg(long, env = "BALLAST_TO_ABI", value_name = "NUMBER", default_value_t = 2, value_parser = clap::value_parser!(u32).range(2..=2))]
    pub to_abi: u32,
    /// How long to copy new connections at most, until the programs of the other version are attached.
    #[arg(long, env = "BALLAST_WAIT", value_name = "DURATION", default_value = "10m", value_parser = value::duration)]
    pub wait: Duration,
}
