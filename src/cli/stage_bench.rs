//! `towline stage --bench`: loads tensors without the agent's memory, and tells how long each stage took.

use std::sync::Arc;

use serde::Serialize;

use super::args::{DeviceName, Stage};
use super::output::printable;
use super::render::by_source;
use super::target::Target;
use super::verbs::{Context, attached};
use crate::audit::Action;
use crate::error::{Error, Result};
use crate::ops::{DecodeOn, DeviceRead, TensorReading, TensorSelector, TensorsRead};
use crate::repository::{Repository, SourceBytes};
use crate::size::show;
use crate::staging::StageTimes;
use crate::staging::cuda::CudaDevice;

/// Result of `stage --bench`.
#[derive(Debug, Serialize)]
struct BenchReport {
    name: String,
    /// `host`, or number and name of the GPU.
    device: String,
    tensors: usize,
    bytes: u64,
    fetched_bytes: u64,
    sources: SourceBytes,
    times: StageTimes,
    /// Sum of the stages' times over the total.
    overlap: f64,
    /// Plain bytes that the device decoded and verified.
    decoded_on_device: u64,
    /// True if the memory was read back and compared.
    compared: bool,
}

/// A loading that has ended.
struct Loaded {
    device: String,
    read: TensorsRead,
    times: StageTimes,
    decoded_on_device: u64,
    compared: bool,
}

impl Context {
    /// Loads tensors to `stage.device`.
    pub(super) async fn bench_staging(&self, what: &Target, stage: &Stage) -> Result<()> {
        let gpu = match stage.device {
            Some(DeviceName::Cuda(ordinal)) => Some(CudaDevice::open(ordinal)?),
            Some(DeviceName::Host) | None => None,
        };
        let decode_on = stage.decode_on.unwrap_or_default();
        if decode_on == DecodeOn::Device && gpu.is_none() {
            return Err(Error::usage("--decode-on gpu needs a GPU to load to")
                .got("--device host")
                .help("give --device cuda:N, or drop --decode-on"));
        }
        let selectors = if stage.tensors.is_empty() { vec![TensorSelector::new("**")?] } else { stage.tensors.clone() };
        let repository = attached(self.open().await?).await;
        let name = self.resolve(&repository, &what.name).await?;
        let recorded = self.record(Action::Restore, &[name.to_string()], &repository, None).await?;
        let line = self.line();
        let loading = async {
            let reading = Arc::new(repository.choose_tensors(&name, what.path.as_deref(), &selectors).await?);
            let loaded = match &gpu {
                Some(gpu) => self.load_to_gpu(&repository, &reading, (gpu, decode_on)).await?,
                None => self.load_to_host(&repository, &reading).await?,
            };
            Ok((reading, loaded))
        };
        let loaded = recorded.end(self.unless_stopped(loading).await, |(reading, _)| reading.bytes()).await;
        drop(line);
        let (reading, loaded) = loaded?;
        let report = BenchReport {
            name: name.to_string(),
            device: loaded.device,
            tensors: reading.tensors().len(),
            bytes: reading.bytes(),
            fetched_bytes: loaded.read.fetched_bytes,
            sources: loaded.read.sources,
            times: loaded.times,
            overlap: loaded.times.overlap(),
            decoded_on_device: loaded.decoded_on_device,
            compared: loaded.compared,
        };
        self.output.report(&report, |report, _| measured(report))
    }

    async fn load_to_host(&self, repository: &Repository, reading: &Arc<TensorReading>) -> Result<Loaded> {
        let table = reading.table()?;
        let (_memory, read, times) = repository.stage_tensors(reading, &table, &self.progress).await?;
        Ok(Loaded { device: "host".to_owned(), read, times, decoded_on_device: 0, compared: false })
    }

    /// Loads to a GPU, and compares what it has.
    async fn load_to_gpu(
        &self,
        repository: &Repository,
        reading: &Arc<TensorReading>,
        (gpu, decode_on): (&CudaDevice, DecodeOn),
    ) -> Result<Loaded> {
        let there = Arc::new(repository.read_tensors_to_new(reading, gpu, decode_on, &self.progress).await?);
        there.compare(repository, reading, &self.progress).await?;
        let device = format!("cuda:{} ({})", gpu.ordinal(), gpu.name());
        let DeviceRead { read, times, on_device } = there.cost;
        Ok(Loaded { device, read, times, decoded_on_device: on_device, compared: true })
    }
}

fn measured(report: &BenchReport) -> String {
    let BenchReport { times, bytes, tensors, .. } = report;
    let (name, size, device) = (printable(&report.name), show(*bytes), printable(&report.device));
    let (fetched, from) = (show(report.fetched_bytes), by_source(&report.sources));
    // A rate needs no more digits than this.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss, reason = "shown")]
    let rate = show((*bytes as f64 / times.total.max(1e-9)) as u64);
    let on_device = match report.decoded_on_device {
        0 => String::new(),
        on_device => format!("  decoded and verified by the GPU: {}\n", show(on_device)),
    };
    let compared = if report.compared { "  read back: the GPU has the same bytes\n" } else { "" };
    format!(
        "{name}: {tensors} tensors, {size}, loaded to {device} in {:.3} s, {rate}/s, from {fetched}{from}\n  \
         first tensor complete after {:.3} s\n  \
         stages: read {:.3} s, decode and verify {:.3} s, wait for pinned memory {:.3} s, copy {:.3} s; overlap {:.2}\n{on_device}{compared}",
        times.total, times.first_tensor, times.read, times.decode, times.wait, times.copy, report.overlap,
    )
}
