//! The address families, and the addresses of clients, endpoints and frontends of the harness.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// IPv4 or IPv6.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    V4,
    V6,
}

impl Family {
    pub const BOTH: [Self; 2] = [Self::V4, Self::V6];

    fn addr(self, net: u8, host: u16) -> IpAddr {
        let [high, low] = host.to_be_bytes();
        match self {
            Self::V4 => IpAddr::from([10, net, high, low]),
            Self::V6 => Ipv6Addr::new(0xfd00, u16::from(net), 0x1234, 0, 0xabcd, 0, 0x77, host).into(),
        }
    }

    /// Returns the address and port of a client.
    pub fn client(self, host: u16, port: u16) -> SocketAddr {
        SocketAddr::new(self.addr(1, host), port)
    }

    /// Returns the address and port of an endpoint.
    pub fn pod(self, host: u16, port: u16) -> SocketAddr {
        SocketAddr::new(self.addr(2, host), port)
    }

    /// Returns the address and port of a frontend.
    pub fn frontend(self, host: u16, port: u16) -> SocketAddr {
        SocketAddr::new(self.addr(96, host), port)
    }

    /// Returns the address that stands for any, as in a call of `bind`.
    pub const fn unspecified(self) -> IpAddr {
        match self {
            Self::V4 => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
            Self::V6 => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
        }
    }

    pub const fn of(ip: IpAddr) -> Self {
        if ip.is_ipv4() { Self::V4 } else { Self::V6 }
    }

    /// Returns the name in the Kubernetes API.
    pub(crate) const fn label(self) -> &'static str {
        match self {
            Self::V4 => "IPv4",
            Self::V6 => "IPv6",
        }
    }
}
