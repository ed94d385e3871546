//! The entries of one map, with addresses, protocols and names in readable form.
//!
//! Zero means "none" in arrays of words: elements that are zero are left out.

mod node;
mod ranges;

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

use aya::maps::MapType;
use proxy_common::abi::Plain;
use proxy_common::affinity::{AffinityEntry, AffinityKey, NetnsAffinityKey};
use proxy_common::config::NodeConfig;
use proxy_common::connections;
use proxy_common::event::Monitor;
use proxy_common::flow::{BUCKET_SLOTS, Bucket, FlowEntry};
use proxy_common::latency::LatencyEntry;
use proxy_common::maglev::base_in;
use proxy_common::map_names as map;
use proxy_common::reason::Reason;
use proxy_common::service::{KIND_ADDRESS, KIND_UNMANAGED, ServiceEntry, ServiceKey};
use proxy_common::socket::{SocketEntry, SocketKey, TO_BACKEND};
use proxy_common::stats::{RefusalKey, ServiceStats};
use serde_json::{Value, json};

use super::flow_row::FlowRow;
use super::{Example, FrontendRow, FrontendRowKind, NameRow, Transport, View, ViewError, flows};
use crate::maps::family::MapFamily;

/// A key and its value.
pub type Entry = (Value, Value);

impl View {
    /// Returns the entries of the map `name`, one of [`map::ALL`] and [`map::OPTIONAL`].
    pub fn dump(&self, name: &str) -> Result<Vec<Entry>, ViewError> {
        let names = self.names()?;
        match name {
            map::SERVICES => self.dump_services::<[u8; 4]>(&names),
            map::SERVICES6 => self.dump_services::<[u8; 16]>(&names),
            map::SLOTS => self.dump_array(map::SLOTS, |id: u32| json!({ "backend": id })),
            map::MAGLEV_INDEX => self.dump_array(
                map::MAGLEV_INDEX,
                |word| json!({ "newer": base_in(word, 0), "older": base_in(word, 1) }),
            ),
            map::MAGLEV => self.dump_array(map::MAGLEV, word),
            map::TURNS => self.dump_array::<u64>(map::TURNS, |turns| json!({ "turns": turns })),
            map::BACKENDS | map::BACKENDS6 => self.dump_backends(name == map::BACKENDS6, &names),
            map::HEALTH => self.dump_array(map::HEALTH, word),
            map::SKIPS => self.dump_array(map::SKIPS, word),
            map::FLOWS => self.dump_flows::<[u8; 4]>(&names),
            map::FLOWS6 => self.dump_flows::<[u8; 16]>(&names),
            map::FLOW_INDEX => self.dump_buckets(map::FLOW_INDEX),
            map::FLOW_INDEX6 => self.dump_buckets(map::FLOW_INDEX6),
            map::CLOCK_HAND => self.dump_array::<u64>(map::CLOCK_HAND, |hand| json!({ "hand": hand })),
            map::SOCKETS => self.dump_sockets::<[u8; 4]>(&names),
            map::SOCKETS6 => self.dump_sockets::<[u8; 16]>(&names),
            map::DIRECT_SEEN => self.dump_array::<u32>(map::DIRECT_SEEN, |seen| json!({ "jiffies": seen })),
            map::PREFILTER => {
                self.dump_array(map::PREFILTER, |word: u64| json!({ "bits": format!("{word:#018x}") }))
            }
            map::CONFIG => Ok(vec![(json!(0), config(&self.node_config()?))]),
            map::SERVICE_STATS => self.dump_service_stats(&names),
            map::BACKEND_STATS => {
                self.dump_array::<u64>(map::BACKEND_STATS, |count| json!({ "connections": count }))
            }
            map::CONNECTIONS => {
                let hz = self.node_config()?.hz;
                let millis = |word| {
                    let parts = connections::answer_time(word, flows::now(hz), hz);
                    u64::from(parts) * 1000 / u64::from((hz * connections::PARTS).max(1))
                };
                self.dump_array(
                    map::CONNECTIONS,
                    |word| json!({ "open": connections::open(word), "answerMs": millis(word) }),
                )
            }
            map::REASONS => {
                let rows = self.reasons()?.into_iter().filter(|(_, count)| *count > 0);
                Ok(rows.map(|(reason, count)| (json!(reason.label()), json!({ "count": count }))).collect())
            }
            map::REFUSALS => self.dump_refusals(&names),
            map::NAMES => Ok(names.iter().map(|(id, name)| (json!(id), self::name(name))).collect()),
            map::NODE => self.dump_node::<[u8; 4]>(),
            map::NODE6 => self.dump_node::<[u8; 16]>(),
            map::NODE_ADDRS => self.dump_node_addrs::<[u8; 4]>(),
            map::NODE_ADDRS6 => self.dump_node_addrs::<[u8; 16]>(),
            map::TUNNELS => self.dump_tunnels(),
            map::DEVICES => self.dump_devices(),
            map::AFFINITY => self.dump_affinity::<[u8; 4]>(&names),
            map::AFFINITY6 => self.dump_affinity::<[u8; 16]>(&names),
            map::AFFINITY_NETNS => self.dump_affinity_netns(&names),
            map::NAMESPACES => self.dump_rows(map::NAMESPACES, MapType::LruHash, |netns: u64, _: u32| {
                (json!({ "netns": netns }), json!({ "pod": true }))
            }),
            map::SRC_RANGES => self.dump_ranges::<[u8; 4]>(&names),
            map::SRC_RANGES6 => self.dump_ranges::<[u8; 16]>(&names),
            map::CONNECT_LATENCY => self.dump_latency(&names),
            map::SOCKET_EXAMPLES => self.dump_socket_examples(&names),
            map::SYN_TIMES => self.dump_array::<u64>(map::SYN_TIMES, |time| json!({ "nanoseconds": time })),
            map::MONITOR => self.dump_rows(map::MONITOR, MapType::Array, |key: u32, value: Monitor| {
                let Monitor { until, live_until, lost, sample, history_until, .. } = value;
                let value = json!({
                    "until": until, "liveUntil": live_until, "historyUntil": history_until, "lost": lost, "sample": sample,
                });
                (json!(key), value)
            }),
            name => Err(ViewError::NoEntries { name: name.to_owned() }),
        }
    }

    /// Returns the elements of an array that are not zero.
    fn dump_array<V: Plain + Default + PartialEq>(
        &self,
        name: &'static str,
        value: impl Fn(V) -> Value,
    ) -> Result<Vec<Entry>, ViewError> {
        let rows = self.pin(name, MapType::Array)?.elements::<V>(0..u32::MAX)?;
        let used = rows.into_iter().filter(|(_, found)| *found != V::default());
        Ok(used.map(|(index, found)| (json!(index), value(found))).collect())
    }

    /// Returns all entries of a map.
    fn dump_rows<K: Plain, V: Plain>(
        &self,
        name: &'static str,
        kind: MapType,
        entry: impl Fn(K, V) -> Entry,
    ) -> Result<Vec<Entry>, ViewError> {
        let rows = self.pin(name, kind)?.all()?;
        Ok(rows.into_iter().map(|(key, value)| entry(key, value)).collect())
    }

    fn dump_services<A: MapFamily>(&self, names: &Names) -> Result<Vec<Entry>, ViewError> {
        self.dump_rows(A::SERVICES, MapType::Hash, |key: ServiceKey<A>, entry: ServiceEntry| {
            let row = FrontendRow::of(key, &entry);
            let (frontend, protocol) = (row.socket(), row.protocol.to_string());
            let ServiceEntry { tag, id, slot_base, slot_count, affinity_secs, ranges, flags, kind, .. } =
                entry;
            (
                json!({ "frontend": frontend, "protocol": protocol, "scope": row.scope.to_string() }),
                json!({
                    "id": id, "service": title(id, names), "kind": kind_label(kind, row.kind),
                    "slotBase": slot_base, "slotCount": slot_count, "affinitySeconds": affinity_secs,
                    "algorithm": row.algorithm, "ranges": ranges, "flags": flags, "tag": tag,
                }),
            )
        })
    }

    fn dump_backends(&self, v6: bool, names: &Names) -> Result<Vec<Entry>, ViewError> {
        let rows = self.backends()?.into_iter().filter(|(_, row)| row.socket.is_ipv6() == v6);
        Ok(rows
            .map(|(id, row)| {
                (
                    json!(id),
                    json!({
                        "address": row.socket, "protocol": row.protocol.to_string(), "state": row.state.label(),
                        "service": title(row.service, names), "serviceId": row.service, "local": row.local,
                        "terminating": row.terminating, "weight": row.weight,
                    }),
                )
            })
            .collect())
    }

    fn dump_flows<A: MapFamily>(&self, names: &Names) -> Result<Vec<Entry>, ViewError> {
        let config = self.node_config()?;
        let now = flows::now(config.hz);
        let entries = self.flow_table::<A>()?;
        let rows = (0..entries.len()).filter_map(|index| {
            let entry = entries.read::<FlowEntry<A>>(index)?;
            let row = flows::row(&entry, &config, now)?;
            Some((json!(index), flow(&row, &entry, names)))
        });
        Ok(rows.collect())
    }

    fn dump_buckets(&self, name: &'static str) -> Result<Vec<Entry>, ViewError> {
        let buckets = self.pin(name, MapType::Array)?.mapped::<Bucket>()?;
        let rows = (0..buckets.len()).filter_map(|index| Some((index, buckets.read::<Bucket>(index)?)));
        let used = rows.filter(|(_, bucket)| *bucket != Bucket::EMPTY);
        Ok(used
            .map(|(index, Bucket { slots, overflow, .. })| {
                let slots = slots.iter().take(BUCKET_SLOTS as usize).map(|slot| format!("{slot:#010x}"));
                let slots: Vec<_> = slots.collect();
                (json!(index), json!({ "slots": slots, "overflow": overflow != 0 }))
            })
            .collect())
    }

    fn dump_sockets<A: MapFamily>(&self, names: &Names) -> Result<Vec<Entry>, ViewError> {
        self.dump_rows(A::SOCKETS, MapType::Hash, |key: SocketKey<A>, entry: SocketEntry<A>| {
            let direction = if key.direction == TO_BACKEND { "to-backend" } else { "to-frontend" };
            (
                json!({
                    "cookie": key.cookie, "address": SocketAddr::new(key.addr.into(), key.port),
                    "protocol": Transport(key.proto).to_string(), "direction": direction,
                }),
                json!({
                    "address": SocketAddr::new(entry.addr.into(), entry.port),
                    "service": title(entry.service, names), "backend": entry.backend_id,
                }),
            )
        })
    }

    fn dump_service_stats(&self, names: &Names) -> Result<Vec<Entry>, ViewError> {
        let rows = self.service_stats(names.keys().copied())?;
        Ok(rows
            .into_iter()
            .map(|(id, stats)| {
                let ServiceStats { connections, packets, bytes, reply_packets, reply_bytes } = stats;
                (
                    json!(id),
                    json!({
                        "service": title(id, names), "connections": connections, "packets": packets,
                        "bytes": bytes, "replyPackets": reply_packets, "replyBytes": reply_bytes,
                    }),
                )
            })
            .collect())
    }

    fn dump_refusals(&self, names: &Names) -> Result<Vec<Entry>, ViewError> {
        self.dump_rows(map::REFUSALS, MapType::LruHash, |RefusalKey { service, reason }, count: u64| {
            let reason =
                Reason::from_number(reason).map_or_else(|| json!(reason), |known| json!(known.label()));
            (json!({ "service": title(service, names), "reason": reason }), json!({ "count": count }))
        })
    }

    fn dump_latency(&self, names: &Names) -> Result<Vec<Entry>, ViewError> {
        let rows = self.latency()?.into_iter();
        Ok(rows
            .map(|((service, backend), LatencyEntry { buckets, sum_us, refused, retransmits })| {
                (
                    json!({ "service": title(service, names), "backend": backend }),
                    json!({ "buckets": buckets, "sumUs": sum_us, "refused": refused, "retransmits": retransmits }),
                )
            })
            .collect())
    }

    fn dump_socket_examples(&self, names: &Names) -> Result<Vec<Entry>, ViewError> {
        let rows = self.socket_examples()?.into_iter();
        Ok(rows
            .map(|((service, bucket), Example { client, backend, took, begun })| {
                (
                    json!({ "service": title(service, names), "bucket": bucket }),
                    json!({
                        "client": client, "backend": backend,
                        "begunNs": begun.as_nanos() as u64, "tookNs": took.as_nanos() as u64,
                    }),
                )
            })
            .collect())
    }

    fn dump_affinity<A: MapFamily>(&self, names: &Names) -> Result<Vec<Entry>, ViewError> {
        let now = flows::now(self.node_config()?.hz);
        self.dump_rows(A::AFFINITY, MapType::Hash, |AffinityKey::<A> { client, service }, entry| {
            let client: IpAddr = client.into();
            (json!({ "client": client, "service": title(service, names) }), affinity(entry, now))
        })
    }

    fn dump_affinity_netns(&self, names: &Names) -> Result<Vec<Entry>, ViewError> {
        let now = flows::now(self.node_config()?.hz);
        self.dump_rows(map::AFFINITY_NETNS, MapType::Hash, |key: NetnsAffinityKey, entry| {
            let NetnsAffinityKey { netns, service, .. } = key;
            (json!({ "netns": netns, "service": title(service, names) }), affinity(entry, now))
        })
    }
}

/// Names of Service ports, by id.
type Names = BTreeMap<u32, NameRow>;

/// Returns the origin of an entry of `services`, or the kind of an entry about an address.
fn kind_label(number: u8, kind: FrontendRowKind) -> Value {
    match number {
        KIND_ADDRESS => json!("Address"),
        KIND_UNMANAGED => json!("Unmanaged"),
        _ => json!(kind.label()),
    }
}

/// Returns `namespace/name:port`, or the id if it has no name; null for 0, which is no id.
fn title(id: u32, names: &Names) -> Value {
    if id == 0 {
        return Value::Null;
    }
    names.get(&id).map_or_else(|| json!(id), |name| json!(name.to_string()))
}

fn name(row: &NameRow) -> Value {
    json!({ "service": row.to_string(), "protocol": row.protocol.to_string(), "family": row.family.to_string() })
}

fn word(word: u64) -> Value {
    json!({ "word": format!("{word:#018x}") })
}

fn affinity(entry: AffinityEntry, now: u32) -> Value {
    let AffinityEntry { backend_id, last_used } = entry;
    json!({ "backend": backend_id, "lastUsed": last_used, "ticksAgo": now.wrapping_sub(last_used).cast_signed().max(0) })
}

fn flow<A>(row: &FlowRow, entry: &FlowEntry<A>, names: &Names) -> Value {
    json!({
        "protocol": row.protocol.to_string(), "client": row.client, "frontend": row.frontend,
        "backend": row.backend, "source": row.source, "service": title(row.service, names),
        "backendId": row.backend_id, "state": row.state.label(), "forwarding": row.forwarding.label(),
        "bits": format!("{:#x}", entry.state as u32), "generation": entry.state >> 32,
        "positions": entry.positions, "ageSeconds": row.age.as_secs_f64(), "idleSeconds": row.idle.as_secs_f64(),
        "timeoutSeconds": row.timeout.as_secs_f64(),
    })
}

/// Returns the settings without the seed: with the seed, an attacker can fill one bucket of the index.
fn config(config: &NodeConfig) -> Value {
    let seconds = |ticks: u32| f64::from(ticks) / f64::from(config.hz.max(1));
    let snat = config.snat.iter().filter(|range| range.count > 0);
    let snat: Vec<String> = snat.map(|range| format!("{}-{}", range.first, range.last())).collect();
    let uplinks: Vec<u32> = config.uplinks.iter().copied().filter(|index| *index != 0).collect();
    json!({
        "abi": config.abi, "hz": config.hz, "flows": config.flows.map(|size| json!({
            "entries": size.entries, "buckets": size.buckets, "searched": size.searched,
        })),
        "flags": config.flags, "snat": snat, "uplinks": uplinks, "hostNetns": config.host_netns,
        "podCgroups": config.pod_cgroups, "meshPorts": config.mesh_ports,
        "timeoutSeconds": {
            "tcpSynSent": seconds(config.tcp_syn_sent), "tcpSynRecv": seconds(config.tcp_syn_recv),
            "tcpEstablished": seconds(config.tcp_established), "tcpCloseWait": seconds(config.tcp_close_wait),
            "tcpTimeWait": seconds(config.tcp_time_wait), "tcpClose": seconds(config.tcp_close),
            "udp": seconds(config.udp), "udpStream": seconds(config.udp_stream),
        },
    })
}
