//! `--compression if-faster`: decides whether compression makes a save end sooner. Pure: rates in, choice out.
//!
//! Storing raw is faster if the target accepts bytes faster than the encoders do, provided that the save waits for the encoders
//! and not for its input. Measurements vary, and encoding makes the repository smaller, so raw must be clearly faster.

use std::time::Duration;

use crate::clock::Timestamp;
use crate::limits::MIB;
use crate::repository::UploadThroughput;

/// Minimum ratio of the target's rate to the encoders' to start storing raw ...
const RAW_RATIO_START: f64 = 1.5;
/// ... and to continue.
const RAW_RATIO_KEEP: f64 = 1.2;
/// Minimum fraction of its time that each worker spends encoding if the save waits for the encoders; workers also read and
/// hash.
const ENCODING_SHARE_MIN: f64 = 1.0 / 3.0;
/// Window of a rate in bytes; older bytes have less and less weight.
const ENCODED_MAX: f64 = 16.0 * MIB as f64;
const UPLOADED_MAX: f64 = 256.0 * MIB as f64;
/// Minimum of encoded bytes before their rate counts.
const ENCODED_MIN: f64 = 4.0 * MIB as f64;
/// Raw bytes after which the encoders are measured again, and the bytes of that measurement: earlier ones may have been slow.
const RAW_RUN: u64 = 256 * MIB;
const PROBE: u64 = 8 * MIB;

/// Encoding of the next chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EncodeChoice {
    Encode,
    Raw,
}

/// Chooses between raw and encoded, given measurements of the encoders and of the target.
#[derive(Debug)]
pub(super) struct IfFaster {
    workers: f64,
    encoders: Rate,
    /// Time between batches of the encoders, including all other work.
    passed: Duration,
    /// Time when the previous batch was finished, if it was encoded.
    last: Option<Timestamp>,
    target: Rate,
    seen: UploadThroughput,
    choice: EncodeChoice,
    /// Bytes stored raw in a row.
    run: u64,
    /// Bytes still to encode in a measurement of the encoders.
    probe: u64,
}

/// Bytes and the time that they took.
#[derive(Clone, Copy, Debug, Default)]
struct Rate {
    bytes: f64,
    seconds: f64,
}

impl IfFaster {
    /// Starts for a save with this many encoder threads.
    pub(super) fn new(workers: usize) -> Self {
        Self {
            workers: workers as f64,
            encoders: Rate::default(),
            passed: Duration::ZERO,
            last: None,
            target: Rate::default(),
            seen: UploadThroughput::default(),
            choice: EncodeChoice::Encode,
            run: 0,
            probe: 0,
        }
    }

    /// Records a batch: its encoded plain bytes and the time of one worker; None for a raw batch.
    pub(super) fn done(&mut self, encoded: Option<(u64, Duration)>, now: Timestamp) {
        let last = std::mem::replace(&mut self.last, encoded.map(|_| now));
        let Some((plain, spent)) = encoded else { return };
        let kept = self.encoders.add(plain, spent, ENCODED_MAX);
        self.passed = self.passed.mul_f64(kept) + last.map_or(spent.div_f64(self.workers), |last| now.since(last));
    }

    /// Chooses for the next `plain` bytes, after the target accepted `throughput`.
    pub(super) fn next(&mut self, plain: u64, taken: UploadThroughput) -> EncodeChoice {
        let (bytes, busy) = (taken.bytes.saturating_sub(self.seen.bytes), taken.busy.saturating_sub(self.seen.busy));
        if bytes > 0 {
            self.target.add(bytes, busy, UPLOADED_MAX);
            self.seen = taken;
        }
        if self.probe > 0 {
            self.probe = self.probe.saturating_sub(plain);
            return EncodeChoice::Encode;
        }
        self.choice = if self.is_raw_faster() { EncodeChoice::Raw } else { EncodeChoice::Encode };
        self.run = if self.choice == EncodeChoice::Raw { self.run + plain } else { 0 };
        if self.run > RAW_RUN {
            (self.run, self.probe) = (0, PROBE);
        }
        self.choice
    }

    fn is_raw_faster(&self) -> bool {
        if self.target.bytes == 0.0 || self.encoders.bytes < ENCODED_MIN {
            return false;
        }
        // Rate of all workers together, as if they only encoded.
        let over = |times: f64| self.target.per_second() >= times * self.encoders.per_second() * self.workers;
        match self.choice {
            EncodeChoice::Raw => over(RAW_RATIO_KEEP),
            EncodeChoice::Encode => {
                let busy = self.encoders.seconds >= ENCODING_SHARE_MIN * self.passed.as_secs_f64() * self.workers;
                busy && over(RAW_RATIO_START)
            }
        }
    }
}

impl Rate {
    /// Adds a measurement; beyond the window all weights are reduced by the returned factor.
    fn add(&mut self, bytes: u64, time: Duration, most: f64) -> f64 {
        let kept = if self.bytes > most { most / self.bytes } else { 1.0 };
        self.bytes = self.bytes * kept + bytes as f64;
        self.seconds = self.seconds * kept + time.as_secs_f64();
        kept
    }

    fn per_second(self) -> f64 {
        if self.seconds > 0.0 { self.bytes / self.seconds } else { f64::INFINITY }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GB: f64 = 1e9;
    const BATCH: u64 = 2 * MIB;
    const PACK: u64 = 64 * MIB;

    /// A save in virtual time: two workers that read, encode or only hash, and a target that accepts one pack while the next is
    /// filled. Rates are in bytes a second; functions get the number of bytes saved so far.
    struct SimulatedSave {
        /// Of what is saved, all workers together.
        reading: f64,
        /// Of one worker.
        encoding: fn(u64) -> f64,
        /// Bytes stored of 100, encoded.
        percent: u64,
        target: fn(u64) -> f64,
    }

    const DEFAULT: SimulatedSave = SimulatedSave { reading: 20.0 * GB, encoding: |_| GB, percent: 70, target: |_| GB };

    impl SimulatedSave {
        /// Saves `total` bytes by the choices of `choose`; returns which batches were stored raw, and the seconds that it took.
        fn save(
            &self,
            total: u64,
            mut choose: impl FnMut(&mut IfFaster, u64, UploadThroughput) -> EncodeChoice,
        ) -> (Vec<bool>, f64) {
            let (mut if_faster, mut raw) = (IfFaster::new(2), Vec::new());
            let took = |bytes: u64, rate: f64| Duration::from_secs_f64(bytes as f64 / rate);
            let (mut now, mut filled) = (Duration::ZERO, 0);
            // Time when the target has each pack, and its throughput.
            let mut uploads: Vec<(Duration, UploadThroughput)> = Vec::new();
            for done in (0..total / BATCH).map(|batch| batch * BATCH) {
                let ended = uploads.iter().filter(|(end, _)| *end <= now);
                let taken = ended.fold(UploadThroughput::default(), |sum, (_, pack)| UploadThroughput {
                    bytes: sum.bytes + pack.bytes,
                    busy: sum.busy + pack.busy,
                });
                let encodes = choose(&mut if_faster, BATCH, taken) == EncodeChoice::Encode;
                raw.push(!encodes);
                let spent = if encodes { took(BATCH, (self.encoding)(done)) } else { Duration::ZERO };
                now += (spent / 2).max(took(BATCH, self.reading));
                filled += if encodes { BATCH * self.percent / 100 } else { BATCH };
                if filled >= PACK {
                    now = now.max(uploads.last().map_or(Duration::ZERO, |(end, _)| *end));
                    let busy = took(filled, (self.target)(done));
                    uploads.push((now + busy, UploadThroughput { bytes: filled, busy }));
                    filled = 0;
                }
                if_faster.done(encodes.then_some((BATCH, spent)), Timestamp(i64::try_from(now.as_nanos()).unwrap()));
            }
            let end = uploads.last().map_or(now, |(end, _)| now.max(*end));
            (raw, end.as_secs_f64())
        }

        fn paced(&self, total: u64) -> (Vec<bool>, f64) {
            self.save(total, IfFaster::next)
        }

        /// Extra time over always encoding, and over never.
        fn over_others(&self, total: u64) -> (f64, f64) {
            let paced = self.paced(total).1;
            let always = |choice| self.save(total, |_, _, _| choice).1;
            (paced / always(EncodeChoice::Encode), paced / always(EncodeChoice::Raw))
        }
    }

    fn part(raw: &[bool]) -> f64 {
        raw.iter().filter(|raw| **raw).count() as f64 / raw.len() as f64
    }

    #[test]
    fn a_slow_target_gets_few_bytes() {
        for target in [(|_| 0.01 * GB) as fn(u64) -> f64, |_| 0.5 * GB, |_| GB, |_| 2.0 * GB, |_| 2.9 * GB] {
            let save = SimulatedSave { target, ..DEFAULT };
            assert!(save.paced(4096 * MIB).0.iter().all(|raw| !raw), "{}", target(0) / GB);
        }
    }

    #[test]
    fn a_fast_target_gets_them_raw() {
        let save = SimulatedSave { target: |_| 5.0 * GB, ..DEFAULT };
        let (raw, _) = save.paced(8192 * MIB);
        assert!(part(&raw) > 0.9 && !raw[0], "{}", part(&raw));
        let (encoded, raw) = save.over_others(8192 * MIB);
        assert!(encoded < 0.5 && raw < 1.2, "{encoded} {raw}");
    }

    #[test]
    fn who_waits_for_what_is_read_loses_nothing_by_encoding() {
        let save = SimulatedSave { reading: 0.5 * GB, target: |_| 5.0 * GB, ..DEFAULT };
        assert!(save.paced(4096 * MIB).0.iter().all(|raw| !raw));
    }

    #[test]
    fn a_target_that_gets_slow_gets_few_bytes_again() {
        let target = |saved| if saved < 2048 * MIB { 6.0 * GB } else { 0.3 * GB };
        let (raw, _) = SimulatedSave { target, ..DEFAULT }.paced(8192 * MIB);
        assert!(part(&raw[256..1024]) > 0.9, "{}", part(&raw[256..1024]));
        assert!(part(&raw[1536..]) < 0.05, "{}", part(&raw[1536..]));
    }

    #[test]
    fn encoders_that_get_fast_are_found_out() {
        let encoding = |saved| if saved < 1024 * MIB { 0.2 * GB } else { 4.0 * GB };
        let (raw, _) = SimulatedSave { encoding, target: |_| 2.0 * GB, ..DEFAULT }.paced(8192 * MIB);
        assert!(part(&raw[128..512]) > 0.9, "{}", part(&raw[128..512]));
        assert!(part(&raw[2048..]) < 0.05, "{}", part(&raw[2048..]));
    }

    /// A target whose rate lies between the two bounds changes nothing.
    #[test]
    fn what_swings_a_little_is_left_as_it_is() {
        let swings = |saved: u64| if (saved / (512 * MIB)).is_multiple_of(2) { 2.5 * GB } else { 2.9 * GB };
        assert!(SimulatedSave { target: swings, ..DEFAULT }.paced(8192 * MIB).0.iter().all(|raw| !raw));
        let begins_fast = |saved: u64| match saved {
            0..1_073_741_824 => 5.0 * GB,
            _ if (saved / (512 * MIB)).is_multiple_of(2) => 2.6 * GB,
            _ => 2.9 * GB,
        };
        let (raw, _) = SimulatedSave { target: begins_fast, ..DEFAULT }.paced(8192 * MIB);
        assert!(part(&raw[512..]) > 0.9, "{}", part(&raw[512..]));
    }

    #[test]
    fn nothing_is_chosen_before_both_rates_are_known() {
        let encoded = Some((4 * MIB, Duration::from_millis(8)));
        let mut if_faster = IfFaster::new(2);
        let taken = UploadThroughput { bytes: PACK, busy: Duration::ZERO };
        assert_eq!(if_faster.next(BATCH, UploadThroughput::default()), EncodeChoice::Encode);
        assert_eq!(if_faster.next(BATCH, taken), EncodeChoice::Encode);
        if_faster.done(encoded, Timestamp(0));
        assert_eq!(if_faster.next(BATCH, taken), EncodeChoice::Raw);
        let mut if_faster = IfFaster::new(2);
        if_faster.done(encoded, Timestamp(0));
        assert_eq!(if_faster.next(BATCH, UploadThroughput::default()), EncodeChoice::Encode);
    }
}
