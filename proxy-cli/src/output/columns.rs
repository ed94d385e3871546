//! The columns of the lists of `ballast`: shells complete them after `--sort-by`, also those of the plugin, which does not make
//! these lists.

use super::list::Column;

/// Columns of `ballast service list`.
pub const FRONTENDS: [Column; 12] = [
    Column::new("SERVICE"),
    Column::new("TYPE"),
    Column::new("ADDRESS").narrow().sorted_by("address"),
    Column::new("ADDRESS").wide().sorted_by("address"),
    Column::new("FOR").wide(),
    Column::new("POLICY").wide(),
    Column::new("AFFINITY").wide().sorted_by("affinitySeconds"),
    Column::new("ALGORITHM").wide(),
    Column::new("SERVICE-ID").number().wide(),
    Column::new("DRAINING").wide().sorted_by("draining.flows"),
    Column::new("ENDPOINTS").narrow(),
    Column::new("ENDPOINTS").wide(),
];

/// Columns of `ballast backend list`.
pub const BACKENDS: [Column; 11] = [
    Column::new("ID").number(),
    Column::new("ENDPOINT"),
    Column::new("STATE"),
    Column::new("LOCAL"),
    Column::new("WEIGHT").number(),
    Column::new("CONNECTIONS").number(),
    Column::new("OPEN").number().sorted_by("open"),
    Column::new("SERVICE"),
    Column::new("POD").wide(),
    Column::new("NODE").wide(),
    Column::new("ZONE").wide(),
];

/// Columns of `ballast flow list`.
pub const FLOWS: [Column; 12] = [
    Column::new("PROTO"),
    Column::new("CLIENT"),
    Column::new("FRONTEND"),
    Column::new("BACKEND"),
    Column::new("STATE"),
    Column::new("AGE").number().clock().sorted_by("ageSeconds"),
    Column::new("IDLE").number().clock().sorted_by("idleSeconds"),
    Column::new("TIMEOUT").number().clock().wide().sorted_by("timeoutSeconds"),
    Column::new("SERVICE").wide(),
    Column::new("FORWARDING").wide(),
    Column::new("SOURCE").wide(),
    Column::new("BACKEND-ID").wide(),
];

/// Columns of `ballast map list`.
pub const MAPS: [Column; 8] = [
    Column::new("NAME"),
    Column::new("TYPE"),
    Column::new("USED").number().sorted_by("used"),
    Column::new("CAPACITY").number().sorted_by("capacity"),
    Column::new("MEMORY").number().sorted_by("memory"),
    Column::new("PIN"),
    Column::new("ID").number().wide(),
    Column::new("SETTING").wide(),
];

/// Columns of `ballast programmed`.
pub const PROGRAMMED: [Column; 7] = [
    Column::new("SERVICE").sorted_by("name"),
    Column::new("VERSION").sorted_by("resourceVersion"),
    Column::new("CURRENT").sorted_by("current"),
    Column::new("SLICES").number(),
    Column::new("SINCE").sorted_by("programmedSince"),
    Column::new("PROBLEMS").narrow().number(),
    Column::new("PROBLEMS").wide(),
];

/// Columns of `ballast config`.
pub const SETTINGS: [Column; 3] = [Column::new("SETTING"), Column::new("VALUE"), Column::new("FROM")];

/// Columns of `ballast stats`.
pub const STATS: [Column; 9] =
    stats(["CONNECTIONS", "PACKETS", "BYTES", "REPLY-PACKETS", "REPLY-BYTES", "REFUSED"]);

/// Columns of `ballast stats --rate`.
pub const RATES: [Column; 9] =
    stats(["CONN/s", "PKTS/s", "BYTES/s", "REPLY-PKTS/s", "REPLY-BYTES/s", "REFUSED/s"]);

const fn stats(
    [connections, packets, bytes, reply_packets, reply_bytes, refused]: [&'static str; 6],
) -> [Column; 9] {
    [
        Column::new("SERVICE"),
        Column::new("PROTO"),
        Column::new("FAMILY"),
        Column::new(connections).number().sorted_by("connections"),
        Column::new(packets).number().sorted_by("packets"),
        Column::new(bytes).number().sorted_by("bytes"),
        Column::new(reply_packets).number().sorted_by("replyPackets"),
        Column::new(reply_bytes).number().sorted_by("replyBytes"),
        Column::new(refused).number().sorted_by("refused"),
    ]
}

/// Returns the columns of the list of this command; none if it is no list.
pub fn columns(command: &str) -> &'static [Column] {
    match command {
        "service list" => &FRONTENDS,
        "backend list" => &BACKENDS,
        "flow list" => &FLOWS,
        "stats" => &STATS,
        "map list" => &MAPS,
        "programmed" => &PROGRAMMED,
        "config" => &SETTINGS,
        _ => &[],
    }
}
