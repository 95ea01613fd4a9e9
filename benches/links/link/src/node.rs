//! A network namespace with a TUN device in it: its other end is a file that gives and takes IP packets.
#![expect(unsafe_code, reason = "a TUN device is made by an ioctl, a namespace by unshare: rustix has both as unsafe")]

use std::fs::{File, OpenOptions};
use std::io;
use std::net::Ipv4Addr;
use std::os::fd::AsRawFd as _;
use std::process::Command;

use rustix::ioctl::{self, Updater};
use rustix::thread::UnshareFlags;

/// `TUNSETIFF`: `_IOW('T', 202, int)` (<https://github.com/torvalds/linux/blob/master/include/uapi/linux/if_tun.h>).
const TUNSETIFF: ioctl::Opcode = ioctl::opcode::write::<i32>(b'T', 202);
/// `IFF_TUN | IFF_NO_PI`: IP packets, with nothing before them (same file).
const TUN_OF_BARE_PACKETS: u16 = 0x0001 | 0x1000;
/// The device's name, in each namespace.
const DEVICE: &str = "link0";
/// Packets that the kernel holds for the forwarder, so that it may wake late: 24 ms of full packets at 2 Gbit/s.
const HELD_PACKETS: &str = "4000";

/// `struct ifreq`, of which the kernel reads the name and the flags (netdevice(7)).
#[repr(C)]
struct Request {
    name: [u8; 16],
    flags: u16,
    rest: [u8; 22],
}

/// A namespace that lives as long as this.
#[derive(Debug)]
pub(crate) struct Place {
    pub(crate) device: File,
    space: File,
}

impl Place {
    /// Makes a namespace whose one way out is a TUN device with `address`.
    pub(crate) fn make(address: Ipv4Addr, mtu: u16) -> io::Result<Self> {
        // The namespace is a thread's: what it starts and opens is in it, and what it has opened stays there.
        let made = std::thread::spawn(move || Self::here(address, mtu)).join();
        made.unwrap_or_else(|_| Err(io::Error::other("the thread that makes a namespace died")))
    }

    fn here(address: Ipv4Addr, mtu: u16) -> io::Result<Self> {
        // SAFETY: the table of open files stays shared; of the network a thread of safe code holds nothing but files.
        unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) }?;
        let device = tun()?;
        // Routers are asked for and neighbours told of by IPv6 alone: packets that no program has sent.
        let _ = std::fs::write("/proc/sys/net/ipv6/conf/all/disable_ipv6", "1");
        ip(&["link", "set", "lo", "up"])?;
        ip(&["address", "add", &format!("{address}/24"), "dev", DEVICE])?;
        ip(&["link", "set", DEVICE, "mtu", &mtu.to_string(), "txqueuelen", HELD_PACKETS, "up"])?;
        Ok(Self { device, space: File::open("/proc/thread-self/ns/net")? })
    }

    /// Where `nsenter --net=` finds the namespace.
    pub(crate) fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.space.as_raw_fd())
    }
}

fn tun() -> io::Result<File> {
    let device = OpenOptions::new().read(true).write(true).open("/dev/net/tun")?;
    let mut request = Request { name: [0; 16], flags: TUN_OF_BARE_PACKETS, rest: [0; 22] };
    request.name[..DEVICE.len()].copy_from_slice(DEVICE.as_bytes());
    // SAFETY: the kernel reads and writes a `struct ifreq` for TUNSETIFF, which `Request` is laid out as.
    let ask = unsafe { Updater::<TUNSETIFF, Request>::new(&mut request) };
    // SAFETY: the descriptor is a TUN device's, and `request` outlives the call.
    unsafe { ioctl::ioctl(&device, ask) }?;
    Ok(device)
}

fn ip(words: &[&str]) -> io::Result<()> {
    let done = Command::new("ip").args(words).output()?;
    let said = String::from_utf8_lossy(&done.stderr);
    done.status.success().then_some(()).ok_or_else(|| io::Error::other(format!("ip {}: {said}", words.join(" "))))
}
