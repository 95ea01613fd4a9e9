//! The middle of the star: a thread that reads each node's packets, and one that gives each node what came for it.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::capture::Capture;
use crate::lane::{Counts, Lane};

/// The largest IP packet.
const PACKET_MAX: usize = 1 << 16;

/// A packet on its way to a node: when it reaches the node's own link, and its number, which keeps equals in order.
type Coming = Reverse<(u64, u64, Box<[u8]>)>;

/// One node's part of the middle.
#[derive(Debug)]
pub(crate) struct Port {
    device: File,
    up: Mutex<Lane>,
    down: Mutex<Lane>,
    coming: Mutex<Inbox>,
    more: Condvar,
    /// Nothing passes while the node is cut off.
    cut: AtomicBool,
    cut_bytes: AtomicU64,
}

#[derive(Debug, Default)]
struct Inbox {
    packets: BinaryHeap<Coming>,
    numbers: u64,
    /// When the thread that empties it will look again, in nanoseconds; 0 while it is looking.
    looks_at: u64,
}

impl Port {
    pub(crate) fn new(device: File, up: Lane, down: Lane) -> Self {
        Self {
            device,
            up: Mutex::new(up),
            down: Mutex::new(down),
            coming: Mutex::default(),
            more: Condvar::new(),
            cut: AtomicBool::new(false),
            cut_bytes: AtomicU64::new(0),
        }
    }

    pub(crate) fn cut(&self, cut: bool) {
        self.cut.store(cut, Ordering::Relaxed);
    }

    /// Counts of packets up and down, and the bytes that met a cut.
    pub(crate) fn counts(&self) -> (Counts, Counts, u64) {
        (lock(&self.up).counts(), lock(&self.down).counts(), self.cut_bytes.load(Ordering::Relaxed))
    }

    /// True if the packet may pass.
    fn open(&self, packet: &[u8]) -> bool {
        let cut = self.cut.load(Ordering::Relaxed);
        if cut {
            self.cut_bytes.fetch_add(packet.len() as u64, Ordering::Relaxed);
        }
        !cut
    }

    fn put(&self, at: u64, packet: Box<[u8]>) {
        let mut inbox = lock(&self.coming);
        inbox.numbers += 1;
        let number = inbox.numbers;
        inbox.packets.push(Reverse((at, number, packet)));
        if at < inbox.looks_at {
            self.more.notify_one();
        }
    }

    /// Takes what comes until `deadline`, and not before something is due.
    fn due(&self, clock: Instant, deadline: u64) -> Vec<(u64, Box<[u8]>)> {
        let mut inbox = lock(&self.coming);
        loop {
            let now = nanos(clock);
            let mut due = Vec::new();
            while inbox.packets.peek().is_some_and(|Reverse((at, ..))| *at <= now) {
                due.extend(inbox.packets.pop().map(|Reverse((at, _, packet))| (at, packet)));
            }
            if !due.is_empty() || deadline <= now {
                inbox.looks_at = 0;
                return due;
            }
            inbox.looks_at = inbox.packets.peek().map_or(deadline, |Reverse((at, ..))| deadline.min(*at));
            let wait = Duration::from_nanos(inbox.looks_at - now);
            inbox = self.more.wait_timeout(inbox, wait).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// Starts the two threads of each port; `subnet` holds the nodes' addresses, the first at 1. They run as long as the process.
pub(crate) fn start(ports: &Arc<[Port]>, subnet: Ipv4Addr, capture: Option<&Arc<Capture>>) {
    let clock = Instant::now();
    for at in 0..ports.len() {
        let (reading, capture) = (Arc::clone(ports), capture.cloned());
        std::thread::spawn(move || read(&reading, (at, subnet), clock, capture.as_deref()));
        let writing = Arc::clone(ports);
        std::thread::spawn(move || write(&writing[at], clock));
    }
}

/// Reads what a node sends, and puts it where it goes.
fn read(ports: &[Port], (at, subnet): (usize, Ipv4Addr), clock: Instant, capture: Option<&Capture>) {
    let (port, mut packet) = (&ports[at], vec![0; PACKET_MAX]);
    // A device that cannot be read any more has gone with its namespace.
    while let Ok(len) = (&port.device).read(&mut packet) {
        let packet = &packet[..len];
        if let Some(capture) = capture {
            capture.add(clock.elapsed(), packet);
        }
        let Some(to) = destination(packet, subnet).and_then(|to| ports.get(to)) else { continue };
        if !port.open(packet) {
            continue;
        }
        let leaves = lock(&port.up).pass(nanos(clock), len);
        if let Some(leaves) = leaves {
            to.put(leaves, packet.into());
        }
    }
}

/// Gives a node what has come for it, each packet at its time.
fn write(port: &Port, clock: Instant) {
    let mut leaving: VecDeque<(u64, Box<[u8]>)> = VecDeque::new();
    loop {
        let deadline = leaving.front().map_or(u64::MAX, |(at, _)| *at);
        for (at, packet) in port.due(clock, deadline) {
            if port.open(&packet)
                && let Some(leaves) = lock(&port.down).pass(at, packet.len())
            {
                leaving.push_back((leaves, packet));
            }
        }
        let now = nanos(clock);
        while leaving.front().is_some_and(|(at, _)| *at <= now) {
            // A packet that the node does not take is a packet lost, as on any network.
            let _ = leaving.pop_front().map(|(_, packet)| (&port.device).write(&packet));
        }
    }
}

/// The number of the node that an IPv4 packet is for.
fn destination(packet: &[u8], subnet: Ipv4Addr) -> Option<usize> {
    let address: &[u8; 4] = packet.get(16..20)?.try_into().ok()?;
    let ours = packet[0] >> 4 == 4 && address[..3] == subnet.octets()[..3];
    ours.then(|| usize::from(address[3]).checked_sub(1))?
}

fn nanos(clock: Instant) -> u64 {
    u64::try_from(clock.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
