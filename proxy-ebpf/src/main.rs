//! The BPF object: entry points only. Each calls one hook function and returns its verdict.
#![cfg_attr(target_arch = "bpf", no_std, no_main)]

#[cfg(not(target_arch = "bpf"))]
fn main() {}

#[cfg(target_arch = "bpf")]
#[expect(clippy::needless_pass_by_value, reason = "the macros hand contexts over by value")]
mod programs {
    use aya_ebpf::macros::{cgroup_sock, cgroup_sock_addr, classifier, sock_ops, xdp};
    use aya_ebpf::programs::{SockAddrContext, SockContext, SockOpsContext, TcContext, XdpContext};
    use proxy_common::{V4, V6};
    use proxy_ebpf::kernel::handle::Kernel;
    use proxy_ebpf::kernel::sock_ops::SockOps;
    use proxy_ebpf::kernel::sockaddr::{BareSock, Sockaddr4, Sockaddr6};
    use proxy_ebpf::kernel::{clock, hook, iter};
    use proxy_ebpf::socket::{bind, call, outcome, release};
    use proxy_ebpf::step::{NEXT, XDP_PASS};

    const MAPS4: Kernel<V4> = Kernel::new();
    const MAPS6: Kernel<V6> = Kernel::new();

    /// The programs of a call on sockets of both families. A socket for IPv6 may have an IPv4 peer.
    macro_rules! on_sockets {
        ($hook4:ident $name4:ident, $hook6:ident $name6:ident: $call:ident) => {
            #[cgroup_sock_addr($hook4)]
            pub fn $name4(ctx: SockAddrContext) -> i32 {
                call::$call(MAPS4, &Sockaddr4::new(&ctx))
            }

            #[cgroup_sock_addr($hook6)]
            pub fn $name6(ctx: SockAddrContext) -> i32 {
                let sockaddr = Sockaddr6::new(&ctx);
                match sockaddr.mapped() {
                    Some(mapped) => call::$call(MAPS4, &mapped),
                    None => call::$call(MAPS6, &sockaddr),
                }
            }
        };
    }
    on_sockets!(connect4 sock_connect4, connect6 sock_connect6: connect);
    on_sockets!(sendmsg4 sock_sendmsg4, sendmsg6 sock_sendmsg6: send);
    on_sockets!(recvmsg4 sock_recvmsg4, recvmsg6 sock_recvmsg6: restore);
    on_sockets!(getpeername4 sock_peer4, getpeername6 sock_peer6: peer_name);

    #[cgroup_sock(post_bind4)]
    pub fn sock_bind4(ctx: SockContext) -> i32 {
        bind::bound4(MAPS4, &BareSock::new(&ctx))
    }

    #[cgroup_sock(post_bind6)]
    pub fn sock_bind6(ctx: SockContext) -> i32 {
        bind::bound6(MAPS4, MAPS6, &BareSock::new(&ctx))
    }

    #[sock_ops]
    pub fn sock_outcome(ctx: SockOpsContext) -> u32 {
        outcome::handle_event(MAPS4, &SockOps(&ctx))
    }

    #[cgroup_sock(sock_release)]
    pub fn sock_release(ctx: SockContext) -> i32 {
        release::released(MAPS4, &BareSock::new(&ctx))
    }

    #[classifier]
    pub fn tc_ingress(ctx: TcContext) -> i32 {
        hook::ingress(&ctx)
    }

    #[classifier]
    pub fn tc_egress(ctx: TcContext) -> i32 {
        hook::egress(&ctx)
    }

    /// Programs that are not attached: the packet programs continue with them by tail calls. Only these programs write to
    /// packets.
    macro_rules! tail_called {
        ($($name:ident = $run:ident::<$family:ident>;)+) => {$(
            #[classifier]
            #[inline(always)]
            pub fn $name(ctx: TcContext) -> i32 {
                hook::$run::<$family>(&ctx)
            }
        )+};
    }
    tail_called! {
        known4 = known::<V4>;
        known6 = known::<V6>;
        stages4 = stages::<V4>;
        stages6 = stages::<V6>;
        tunnel4 = tunnel::<V4>;
        tunnel6 = tunnel::<V6>;
    }

    /// With frags, since a device with a large MTU accepts no other program. Packets in several buffers pass.
    #[xdp(frags)]
    pub fn xdp_ingress(ctx: XdpContext) -> u32 {
        hook::early(&ctx, false)
    }

    /// The same for generic XDP, without frags: with frags, packets began with the IP header for programs at tc ingress
    /// (Linux 6.18).
    #[xdp]
    pub fn xdp_generic(ctx: XdpContext) -> u32 {
        hook::early(&ctx, true)
    }

    /// Lists the UDP sockets of a network namespace that are connected to a Service.
    #[unsafe(no_mangle)]
    #[unsafe(link_section = "iter/udp")]
    pub extern "C" fn iter_udp(ctx: *mut iter::NamespaceIterator) -> i32 {
        // SAFETY: the kernel hands every program a valid context.
        unsafe { iter::of_namespace(ctx) }
    }

    /// Lists the TCP sockets of a network namespace that are connected to a Service.
    #[unsafe(no_mangle)]
    #[unsafe(link_section = "iter/tcp")]
    pub extern "C" fn iter_tcp(ctx: *mut iter::NamespaceIterator) -> i32 {
        // SAFETY: the kernel hands every program a valid context.
        unsafe { iter::of_namespace(ctx) }
    }

    /// Lists the sockets that are connected to a Service, of all network namespaces.
    #[unsafe(no_mangle)]
    #[unsafe(link_section = "iter/bpf_sk_storage_map")]
    pub extern "C" fn iter_sockets(ctx: *mut iter::StorageIterator) -> i32 {
        // SAFETY: the kernel hands every program a valid context.
        unsafe { iter::of_all(ctx) }
    }

    /// Never attached: the agent runs it with `BPF_PROG_TEST_RUN`, and computes from its two clocks how many jiffies a second
    /// has. Writes `bpf_jiffies64()` and `bpf_ktime_get_ns()` to the first 16 bytes of the packet.
    #[classifier]
    pub fn clock(ctx: TcContext) -> i32 {
        clock::clock(&ctx)
    }

    /// Never attached: the baseline of measurements with `BPF_PROG_TEST_RUN`.
    #[classifier]
    pub fn nop(_ctx: TcContext) -> i32 {
        NEXT
    }

    /// The same for XDP. A device to which another device redirects packets by XDP may need a program.
    #[xdp(frags)]
    pub fn xdp_nop(_ctx: XdpContext) -> u32 {
        XDP_PASS
    }

    #[panic_handler]
    fn panic(_info: &core::panic::PanicInfo<'_>) -> ! {
        loop {}
    }

    #[unsafe(link_section = "license")]
    #[unsafe(no_mangle)]
    static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
}
