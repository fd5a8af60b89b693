//! Random pairs of snapshots: the changes between the two, read over NBD and applied over NBD to a
//! copy of the one, make it the other. `BLOCKD_PAIRS` says how many.
#![allow(clippy::unwrap_used, reason = "a helper that fails fails its test")]

mod cli_support;

use blockd_api::v1;
use blockd_api::v1::control_client::ControlClient;
use blockd_nbd::client::{ChangedRange, Client, ConnectOptions, Uri};
use cli_support::Daemon;
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tokio::runtime::Runtime;
use tonic::transport::{Channel, Endpoint};

/// Few extents, so that changes meet; the end is within one.
const SIZE: u64 = 8 * EXTENT + 36864;
const EXTENT: u64 = 64 << 10;
/// Pairs by default: some two seconds.
const PAIRS: usize = 60;
/// One pair in this many goes through a file as well.
const THROUGH_A_FILE: usize = 10;

struct Rig {
    daemon: Daemon,
    runtime: Runtime,
    control: ControlClient<Channel>,
    random: fastrand::Rng,
}

impl Rig {
    fn new(seed: u64) -> Self {
        let daemon = Daemon::start("64M");
        let pool = ["pool", "create", "small", "--memory", "--size", "64M", "--extent-size", "64K"];
        daemon.ok(&pool);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let path = daemon.socket();
        let connector = tower::service_fn(move |_| {
            let path = path.clone();
            async move { UnixStream::connect(path).await.map(TokioIo::new) }
        });
        let endpoint = Endpoint::from_static("http://blockd.invalid");
        let channel = {
            let _entered = runtime.enter();
            endpoint.connect_with_connector_lazy(connector)
        };
        let (control, random) = (ControlClient::new(channel), fastrand::Rng::with_seed(seed));
        Self { daemon, runtime, control, random }
    }

    fn add(&mut self, name: &str) {
        let request = v1::CreateVolumeRequest {
            name: name.to_owned(),
            pool: "small".to_owned(),
            size_bytes: i64::try_from(SIZE).unwrap(),
            ..Default::default()
        };
        self.runtime.block_on(self.control.create_volume(request)).unwrap();
    }

    fn snapshot(&mut self, volume: &str, name: &str) {
        let member = v1::SnapshotMember { volume: volume.to_owned(), name: name.to_owned() };
        let (pool, members) = ("small".to_owned(), vec![member]);
        let request = v1::CreateSnapshotsRequest { pool, members, ..Default::default() };
        self.runtime.block_on(self.control.create_snapshots(request)).unwrap();
    }

    fn clone_of(&mut self, snapshot: &str, name: &str) {
        let request = v1::CloneVolumeRequest {
            name: name.to_owned(),
            pool: "small".to_owned(),
            snapshot: snapshot.to_owned(),
            ..Default::default()
        };
        self.runtime.block_on(self.control.clone_volume(request)).unwrap();
    }

    fn resize(&mut self, name: &str, size: u64) {
        let request = v1::ResizeVolumeRequest {
            name: name.to_owned(),
            pool: "small".to_owned(),
            size_bytes: i64::try_from(size).unwrap(),
            shrink: true,
            ..Default::default()
        };
        self.runtime.block_on(self.control.resize_volume(request)).unwrap();
    }

    fn delete(&mut self, name: &str) {
        let request = v1::DeleteVolumeRequest {
            name: name.to_owned(),
            pool: "small".to_owned(),
            force: true,
            ..Default::default()
        };
        self.runtime.block_on(self.control.delete_volume(request)).unwrap();
    }

    /// A connection; the volume is attached for it.
    fn connect(&mut self, name: &str, since: Option<&str>, extended: bool) -> Client {
        let request = v1::AttachVolumeRequest {
            name: name.to_owned(),
            pool: "small".to_owned(),
            front_end: v1::FrontEnd::Nbd.into(),
            ..Default::default()
        };
        let answer = self.runtime.block_on(self.control.attach_volume(request)).unwrap();
        let uri: Uri = answer.into_inner().volume.unwrap().nbd_uri.parse().unwrap();
        let contexts = since.map(|since| format!("blockd:changed-since:{since}"));
        let contexts = contexts.into_iter().collect();
        let options = ConnectOptions { contexts, extended, ..ConnectOptions::default() };
        Client::connect(&uri, &options).unwrap()
    }

    /// Some requests at places that meet often, and of a few sizes.
    fn change(&mut self, name: &str, count: usize) {
        let mut client = self.connect(name, None, true);
        for _ in 0..count {
            let (size, random) = (client.size(), &mut self.random);
            let unit = if random.bool() { 512 } else { 4096 };
            let offset = random.u64(0..size / unit) * unit;
            let len = (random.u64(1..=64) * unit).min((size - offset) / unit * unit);
            match random.u8(..10) {
                0 => client.trim(offset, len).unwrap(),
                1 => client.write_zeroes(offset, len, random.bool()).unwrap(),
                2 => client.write(offset, &vec![0; usize::try_from(len).unwrap()], false).unwrap(),
                _ => {
                    let byte = random.u8(1..);
                    let data = vec![byte; usize::try_from(len).unwrap()];
                    client.write(offset, &data, false).unwrap();
                }
            }
        }
        client.disconnect().unwrap();
    }

    fn content(&mut self, name: &str) -> Vec<u8> {
        let mut client = self.connect(name, None, true);
        let mut bytes = vec![0; usize::try_from(client.size()).unwrap()];
        client.read(0, &mut bytes).unwrap();
        client.disconnect().unwrap();
        bytes
    }

    /// Makes `copy`, which holds what `from` holds, into what `to` holds. The bytes it took.
    fn apply(&mut self, from: &str, to: &str, copy: &str) -> u64 {
        let extended = self.random.bool();
        let mut source = self.connect(to, Some(from), extended);
        self.resize(copy, source.size());
        let mut target = self.connect(copy, None, true);
        let (mut at, mut moved) = (0, 0);
        while at < source.size() {
            let ask = self.random.u64(1..=64) * 8192;
            let ranges = source.changes(at, ask.min(source.size() - at)).unwrap();
            assert!(!ranges.is_empty());
            for ChangedRange { len, changed, zero } in ranges {
                if changed && zero {
                    target.write_zeroes(at, len, false).unwrap();
                } else if changed {
                    let mut data = vec![0; usize::try_from(len).unwrap()];
                    source.read(at, &mut data).unwrap();
                    target.write(at, &data, false).unwrap();
                    moved += len;
                }
                at += len;
            }
        }
        target.flush().unwrap();
        source.disconnect().unwrap();
        target.disconnect().unwrap();
        moved
    }

    /// Two snapshots of a volume with changes between them; then the one is made of the other, in
    /// either direction.
    fn pair(&mut self, number: usize) -> (u64, u64) {
        let before = self.random.usize(0..12);
        self.change("volume", before);
        self.snapshot("volume", "volume@1");
        if self.random.u8(..4) == 0 {
            let size = (SIZE / 8192 + self.random.u64(0..SIZE / 8192)) * 4096;
            self.resize("volume", size);
        }
        let after = self.random.usize(0..12);
        self.change("volume", after);
        self.snapshot("volume", "volume@2");
        let (from, to) =
            if self.random.bool() { ("volume@1", "volume@2") } else { ("volume@2", "volume@1") };
        self.clone_of(from, "copy");
        let moved = self.apply(from, to, "copy");
        let expected = self.content(to);
        assert!(self.content("copy") == expected, "pair {number}: the copy differs");
        if number.is_multiple_of(THROUGH_A_FILE) {
            self.clone_of(from, "other");
            let file = ["export", to, "pair.blkd", "--since", from, "--pool", "small", "--force"];
            self.daemon.ok(&file);
            self.daemon.ok(&["import", "pair.blkd", "other", "--apply", "--pool", "small"]);
            assert!(self.content("other") == expected, "pair {number}: the file's copy differs");
            for one in self.daemon.json(&["list", "--pool", "small"])["volumes"].as_array().unwrap()
            {
                let name = one["name"].as_str().unwrap();
                if name.starts_with("other") {
                    self.delete(name);
                }
            }
        }
        for name in ["copy", "volume@1", "volume@2"] {
            self.delete(name);
        }
        (moved, u64::try_from(expected.len()).unwrap())
    }
}

#[test]
fn a_difference_applied_to_the_one_makes_it_the_other() {
    let pairs = std::env::var("BLOCKD_PAIRS").map_or(PAIRS, |text| text.parse().unwrap());
    let seed = std::env::var("BLOCKD_SEED").map_or(1, |text| text.parse().unwrap());
    let mut rig = Rig::new(seed);
    rig.add("volume");
    let (mut moved, mut whole) = (0, 0);
    for number in 0..pairs {
        let (part, all) = rig.pair(number);
        (moved, whole) = (moved + part, whole + all);
    }
    println!("{pairs} pairs: {moved} of {whole} bytes moved, 0 differ");
    assert!(moved > 0 && moved < whole, "{moved} of {whole} bytes were moved");
}
