//! Every packet that nodes send, in a file as tcpdump and Wireshark read it.

use std::fs::File;
use std::io::{self, BufWriter, Write as _};
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// `LINKTYPE_RAW`: IP packets, with nothing before them (<https://www.tcpdump.org/linktypes.html>).
const IP_PACKETS: u32 = 101;

/// A file that grows (<https://datatracker.ietf.org/doc/draft-ietf-opsawg-pcap/>).
#[derive(Debug)]
pub(crate) struct Capture(Mutex<BufWriter<File>>);

impl Capture {
    pub(crate) fn create(path: &Path) -> io::Result<Self> {
        let mut file = BufWriter::new(File::create(path)?);
        // The magic number of microseconds, version 2.4, two words that are 0, the longest packet, what packets are.
        for word in [0xa1b2_c3d4, 2 | 4 << 16, 0, 0, 0xffff, IP_PACKETS] {
            file.write_all(&u32::to_le_bytes(word))?;
        }
        Ok(Self(Mutex::new(file)))
    }

    /// Adds a packet, sent so long after the start.
    pub(crate) fn add(&self, at: Duration, packet: &[u8]) {
        let mut file = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let seconds = u32::try_from(at.as_secs()).unwrap_or(u32::MAX);
        let len = u32::try_from(packet.len()).unwrap_or(u32::MAX);
        let head = [seconds, at.subsec_micros(), len, len].map(u32::to_le_bytes).concat();
        // A disk that is full leaves less in the file: who reads it looks for what it wants to find.
        let _ = file.write_all(&head).and_then(|()| file.write_all(packet));
    }

    /// Has everything so far in the file.
    pub(crate) fn flush(&self) -> io::Result<()> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).flush()
    }
}
