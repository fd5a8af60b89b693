//! A network of machines by themselves: a switch in this process, to which each of them is plugged
//! by a pair of Unix sockets. Nothing of the host's own network is part of it.

use std::os::unix::net::UnixDatagram;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result};
use blockd_testkit::folder::Folder;

use super::drive::option;

/// The largest frame of qemu's: one of 64 KiB with its headers.
const FRAME: usize = 68 << 10;
/// The switch looks this often for its end.
const PATIENCE: Duration = Duration::from_millis(200);
/// All but the last byte of a machine's hardware address. The last is its number, so that the
/// switch need not learn who is where.
const ADDRESS: [u8; 5] = [0x52, 0x54, 0x00, 0x12, 0x34];

/// A switch with some ports. Dropped, it is gone.
#[derive(Debug)]
pub struct Network {
    folder: Folder,
    links: Arc<[Link]>,
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

/// One port with its cable.
#[derive(Debug)]
struct Link {
    socket: UnixDatagram,
    /// The machine's end.
    machine: PathBuf,
    cut: AtomicBool,
}

/// A port for one machine.
#[derive(Clone, Debug)]
pub(super) struct Port {
    number: usize,
    switch: PathBuf,
    machine: PathBuf,
}

impl Network {
    /// A switch with this many ports, numbered from 0.
    ///
    /// # Errors
    /// When its sockets can't be made.
    pub fn new(ports: u8) -> Result<Self> {
        let folder = Folder::new("net")?;
        let link = |number| {
            let socket = UnixDatagram::bind(folder.path().join(format!("switch-{number}")))?;
            socket.set_read_timeout(Some(PATIENCE))?;
            let machine = folder.path().join(format!("machine-{number}"));
            Ok(Link { socket, machine, cut: AtomicBool::new(false) })
        };
        let links: Result<Vec<Link>> = (0..ports).map(link).collect();
        let links: Arc<[Link]> = links.context("making a network")?.into();
        let stop = Arc::new(AtomicBool::new(false));
        let threads = (0..links.len()).map(|from| {
            let (links, stop) = (Arc::clone(&links), Arc::clone(&stop));
            std::thread::spawn(move || forward(&links, from, &stop))
        });
        let threads = threads.collect();
        Ok(Self { folder, links, stop, threads })
    }

    /// Takes a machine's cable out, or puts it in again.
    pub fn cut(&self, port: usize, cut: bool) {
        self.links[port].cut.store(cut, Ordering::Relaxed);
    }

    pub(super) fn port(&self, number: usize) -> Port {
        let switch = self.folder.path().join(format!("switch-{number}"));
        Port { number, switch, machine: self.links[number].machine.clone() }
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

impl Port {
    /// Words for qemu that plug the machine in.
    pub(super) fn words(&self) -> [String; 4] {
        let [a, b, c, d, e] = ADDRESS;
        let f = self.number;
        let (machine, switch) = (option(&self.machine), option(&self.switch));
        [
            "-netdev".into(),
            format!(
                "dgram,id=net0,local.type=unix,local.path={machine},\
                 remote.type=unix,remote.path={switch}"
            ),
            "-device".into(),
            format!(
                "virtio-net-pci,netdev=net0,romfile=,\
                 mac={a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{f:02x}"
            ),
        ]
    }
}

/// Hands on what one machine sends. A frame for a machine that is frozen, off or cut off is lost,
/// as on any network.
fn forward(links: &[Link], from: usize, stop: &AtomicBool) {
    let mut frame = vec![0; FRAME];
    // Unlike those that are read from, it does not wait for a machine that stands still.
    let Ok(out) = UnixDatagram::unbound() else { return };
    if out.set_nonblocking(true).is_err() {
        return;
    }
    while !stop.load(Ordering::Relaxed) {
        let Ok(len) = links[from].socket.recv(&mut frame) else { continue };
        let frame = &frame[..len];
        let to_all = frame.first().is_some_and(|first| first & 1 == 1);
        let only = frame.get(ADDRESS.len()).filter(|_| !to_all).map(|last| usize::from(*last));
        for (to, link) in links.iter().enumerate() {
            let meant = to != from && only.is_none_or(|only| only == to);
            let whole = |link: &Link| !link.cut.load(Ordering::Relaxed);
            if meant && whole(link) && whole(&links[from]) {
                let _ = out.send_to(frame, &link.machine);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_reaches_the_machine_it_is_for_unless_its_cable_is_out() {
        let network = Network::new(3).unwrap();
        let machine = |number: usize| {
            let socket = UnixDatagram::bind(network.port(number).machine).unwrap();
            socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
            socket
        };
        let [zero, one, two] = [0, 1, 2].map(machine);
        let heard = |socket: &UnixDatagram| {
            let mut frame = [0; 64];
            socket.recv(&mut frame).map(|len| frame[..len].to_vec()).unwrap()
        };
        // Not connected: that would take frames from the peer's address only.
        let send = |frame: &[u8]| zero.send_to(frame, network.port(0).switch).unwrap();
        let frame = |to: u8, content: u8| [&ADDRESS[..], &[to, content]].concat();
        send(&frame(1, 7));
        assert_eq!(heard(&one), frame(1, 7));
        send(&[0xff; 6]);
        assert_eq!((heard(&one), heard(&two)), (vec![0xff; 6], vec![0xff; 6]));
        network.cut(1, true);
        send(&frame(1, 8));
        // Once this has passed the switch, the one before it has as well.
        send(&frame(2, 9));
        assert_eq!(heard(&two), frame(2, 9));
        network.cut(1, false);
        send(&frame(1, 10));
        assert_eq!(heard(&one), frame(1, 10));
    }
}
