//! Congestion control: quinn's BBR, without its pause at the begin of each connection.

use std::any::Any;
use std::sync::Arc;
use std::time::{Duration, Instant};

use quinn::congestion::{BbrConfig, Controller, ControllerFactory, ControllerMetrics};
use quinn_proto::RttEstimator;

/// Time for which BBR keeps the window small to measure the round trip, every 10 seconds
/// (<https://datatracker.ietf.org/doc/html/draft-cardwell-iccrg-bbr-congestion-control-00#section-4.3.5>).
const PROBE_RTT_TIME: Duration = Duration::from_millis(200);

/// Makes a [`Bbr`] for each connection.
#[derive(Debug, Default)]
pub(super) struct BbrFactory(Arc<BbrConfig>);

impl ControllerFactory for BbrFactory {
    fn build(self: Arc<Self>, now: Instant, current_mtu: u16) -> Box<dyn Controller> {
        let controller = Arc::clone(&self.0).build(now, current_mtu);
        let floor = controller.initial_window();
        Box::new(Bbr { controller, has_acks: false, has_measured: false, floor })
    }
}

/// BBR, which uses the rate at which packets arrive (<https://doi.org/10.1145/3009824>).
///
/// quinn-proto 0.11 measures the round trip of a new connection as soon as packets fill the window, because there was no measurement
/// in the last 10 seconds. To measure, it reduces the window for 200 ms to three quarters of the bytes that arrived in one round trip
/// before: next to nothing after a handshake. Google's BBR, from which it is ported, does not (`MaybeUpdateMinRtt` in
/// <https://github.com/google/quiche/blob/main/quiche/quic/core/congestion_control/bbr_sender.cc>). This controller measures with
/// the first acknowledgements, those of the handshake, and keeps the window meanwhile.
struct Bbr {
    controller: Box<dyn Controller>,
    has_acks: bool,
    has_measured: bool,
    /// Minimum of the window until the first measurement is over.
    floor: u64,
}

impl Controller for Bbr {
    fn on_sent(&mut self, now: Instant, bytes: u64, last_packet_number: u64) {
        self.controller.on_sent(now, bytes, last_packet_number);
    }

    fn on_ack(&mut self, now: Instant, sent: Instant, bytes: u64, app_limited: bool, rtt: &RttEstimator) {
        // Samples of the handshake count: they are the first measurement of the round trip.
        let app_limited = app_limited && self.has_measured;
        self.has_acks = true;
        self.controller.on_ack(now, sent, bytes, app_limited, rtt);
    }

    fn on_end_acks(&mut self, now: Instant, in_flight: u64, app_limited: bool, largest_acked: Option<u64>) {
        if self.has_measured {
            self.controller.on_end_acks(now, in_flight, app_limited, largest_acked);
            if self.controller.window() >= self.floor {
                self.floor = 0;
            }
        } else if self.has_acks {
            // Begins the measurement so that it is over with the next round trip.
            let begun = now.checked_sub(PROBE_RTT_TIME).unwrap_or(now);
            self.controller.on_end_acks(begun, 0, false, largest_acked);
            self.has_measured = true;
        }
    }

    fn on_congestion_event(&mut self, now: Instant, sent: Instant, is_persistent_congestion: bool, lost_bytes: u64) {
        self.controller.on_congestion_event(now, sent, is_persistent_congestion, lost_bytes);
    }

    fn on_mtu_update(&mut self, new_mtu: u16) {
        self.controller.on_mtu_update(new_mtu);
    }

    fn window(&self) -> u64 {
        self.controller.window().max(self.floor)
    }

    fn metrics(&self) -> ControllerMetrics {
        self.controller.metrics()
    }

    fn clone_box(&self) -> Box<dyn Controller> {
        let Self { controller, has_acks, has_measured, floor } = self;
        let (has_acks, has_measured, floor) = (*has_acks, *has_measured, *floor);
        Box::new(Self { controller: controller.clone_box(), has_acks, has_measured, floor })
    }

    fn initial_window(&self) -> u64 {
        self.controller.initial_window()
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, SocketAddr};

    use quinn::{ClientConfig, Endpoint, ServerConfig, TransportConfig};
    use tokio::net::UdpSocket;
    use tokio::time::sleep;

    use super::*;

    const ANY_PORT: (Ipv4Addr, u16) = (Ipv4Addr::LOCALHOST, 0);
    /// Bytes of less than two windows, so that the rate keeps growing.
    const BYTES: usize = 400_000;

    /// Relays packets to `server`, each after 20 ms, both ways; returns the address for the client.
    async fn relay(server: SocketAddr) -> SocketAddr {
        let near = Arc::new(UdpSocket::bind(ANY_PORT).await.unwrap());
        let far = Arc::new(UdpSocket::bind(ANY_PORT).await.unwrap());
        far.connect(server).await.unwrap();
        let address = near.local_addr().unwrap();
        tokio::spawn(async move {
            let (mut up, mut down, mut client) = ([0; 2000], [0; 2000], None);
            loop {
                let (to, packet, receiver) = tokio::select! {
                    got = near.recv_from(&mut up) => {
                        let (len, from) = got.unwrap();
                        client = Some(from);
                        (Arc::clone(&far), up[..len].to_vec(), server)
                    }
                    got = far.recv(&mut down) => (Arc::clone(&near), down[..got.unwrap()].to_vec(), client.unwrap()),
                };
                tokio::spawn(async move {
                    sleep(Duration::from_millis(20)).await;
                    let _ =
                        if receiver == server { to.send(&packet).await } else { to.send_to(&packet, receiver).await };
                });
            }
        });
        address
    }

    /// Smallest window of a server while it sends [`BYTES`].
    async fn smallest_window(factory: Arc<dyn ControllerFactory + Send + Sync>) -> u64 {
        let key = rcgen::generate_simple_self_signed(["towline".to_owned()]).unwrap();
        let certificate = key.cert.der().clone();
        let mut config = ServerConfig::with_single_cert(
            vec![certificate.clone()],
            rustls::pki_types::PrivatePkcs8KeyDer::from(key.signing_key.serialize_der()).into(),
        )
        .unwrap();
        let mut transport = TransportConfig::default();
        transport.congestion_controller_factory(factory);
        config.transport_config(Arc::new(transport));
        let server = Endpoint::server(config, ANY_PORT.into()).unwrap();
        let mut roots = rustls::RootCertStore::empty();
        roots.add(certificate).unwrap();
        let mut client = Endpoint::client(ANY_PORT.into()).unwrap();
        client.set_default_client_config(ClientConfig::with_root_certificates(Arc::new(roots)).unwrap());

        let address = relay(server.local_addr().unwrap()).await;
        let reading = tokio::spawn(async move {
            let connection = client.connect(address, "towline").unwrap().await.unwrap();
            connection.accept_uni().await.unwrap().read_to_end(BYTES).await.unwrap().len()
        });
        let connection = server.accept().await.unwrap().await.unwrap();
        let mut stream = connection.open_uni().await.unwrap();
        let watched = connection.clone();
        let watching = async move {
            let mut least = u64::MAX;
            while watched.close_reason().is_none() {
                least = least.min(watched.stats().path.cwnd);
                sleep(Duration::from_millis(1)).await;
            }
            least
        };
        let sending = async {
            stream.write_all(&vec![7; BYTES]).await.unwrap();
            stream.finish().unwrap();
            assert_eq!(reading.await.unwrap(), BYTES);
            connection.close(0u8.into(), b"");
        };
        tokio::join!(watching, sending).0
    }

    #[tokio::test]
    async fn the_window_of_a_new_connection_does_not_shrink() {
        let initial = Arc::new(BbrFactory::default()).build(Instant::now(), 1200).window();
        assert!(smallest_window(Arc::new(BbrFactory::default())).await >= initial);
        // Once quinn's own does not shrink either, it can be used as it is.
        assert!(smallest_window(Arc::new(BbrConfig::default())).await < initial);
    }
}
