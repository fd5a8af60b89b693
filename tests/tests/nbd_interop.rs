//! The clients that people have, on real volumes of a real daemon.
#![allow(clippy::unwrap_used, reason = "test code")]

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use blockd_testkit::daemon::{Daemon, Settings};
use blockd_testkit::folder::Folder;
use blockd_testkit::tools::{self, shell};

const MIB: u64 = 1 << 20;

/// A daemon that serves one volume of this size, `data`.
fn serving(name: &str, size: u64) -> Daemon {
    let mut daemon = Daemon::new(name, &Settings::default()).unwrap();
    daemon.start().unwrap();
    daemon.add("data", size).unwrap();
    daemon
}

/// A file with stretches of data, of zeroes and of nothing.
fn source(folder: &Folder, size: u64, dense: bool) -> PathBuf {
    let path = folder.path().join("source");
    let mut rng = fastrand::Rng::with_seed(size);
    let file = fs::File::create(&path).unwrap();
    file.set_len(size).unwrap();
    let piece = 192 << 10;
    for (number, at) in (0..size).step_by(piece).enumerate() {
        if !dense && number % 3 != 0 {
            continue;
        }
        let len = piece.min(usize::try_from(size - at).unwrap());
        let mut data = vec![0; len];
        if dense || number % 2 == 0 {
            rng.fill(&mut data);
        }
        std::os::unix::fs::FileExt::write_all_at(&file, &data, at).unwrap();
    }
    path
}

#[test]
fn nbdinfo_sees_what_the_volume_is() {
    let daemon = serving("info", 96 * MIB);
    daemon.add("other", 64 * MIB).unwrap();
    let uri = daemon.uri("data");
    assert_eq!(shell(&format!("nbdinfo --size '{uri}'")).unwrap().trim(), "100663296");
    let info = shell(&format!("nbdinfo --json '{uri}'")).unwrap();
    let info: serde_json::Value = serde_json::from_str(&info).unwrap();
    let export = &info["exports"][0];
    for can in ["can_flush", "can_fua", "can_trim", "can_zero", "can_multi_conn", "can_cache"] {
        assert_eq!(export[can], true, "{can} in {info}");
    }
    assert_eq!(export["is_read_only"], false, "{info}");
    assert_eq!(export["block_size_minimum"], 512, "{info}");
    assert_eq!(export["contexts"][0], "base:allocation", "{info}");
    let list = shell(&format!("nbdinfo --json --list '{}'", daemon.uri(""))).unwrap();
    let list: serde_json::Value = serde_json::from_str(&list).unwrap();
    let names: Vec<&str> = list["exports"]
        .as_array()
        .unwrap()
        .iter()
        .map(|e| e["export-name"].as_str().unwrap())
        .collect();
    assert!(names.iter().any(|name| name.ends_with("data")), "{names:?}");
    assert!(names.iter().any(|name| name.ends_with("other")), "{names:?}");
}

#[test]
fn the_map_is_what_was_written() {
    let daemon = serving("map", 16 * MIB);
    let uri = daemon.uri("data");
    let map = || shell(&format!("nbdinfo --map '{uri}'")).unwrap();
    let whole = map();
    assert!(whole.contains("16777216") && whole.contains("hole,zero"), "{whole}");
    shell(&format!("qemu-io -f raw -c 'write -P 1 1M 64k' -c 'write -P 2 4M 4k' '{uri}'")).unwrap();
    let rows = |text: &str| -> Vec<(u64, u64, String)> {
        let row = |line: &str| {
            let mut words = line.split_whitespace();
            let mut number = || words.next().unwrap().parse().unwrap();
            let (offset, len) = (number(), number());
            (offset, len, words.last().unwrap().to_owned())
        };
        text.lines().map(row).collect()
    };
    // The rest of an extent that has space is zero without being a hole.
    let expected = [
        (0, MIB, "hole,zero"),
        (MIB, 64 << 10, "data"),
        (MIB + (64 << 10), 192 << 10, "zero"),
        (MIB + (256 << 10), 3 * MIB - (256 << 10), "hole,zero"),
        (4 * MIB, 4 << 10, "data"),
        (4 * MIB + (4 << 10), 252 << 10, "zero"),
        (4 * MIB + (256 << 10), 12 * MIB - (256 << 10), "hole,zero"),
    ];
    let expected: Vec<_> = expected.map(|(at, len, kind)| (at, len, kind.to_owned())).into();
    assert_eq!(rows(&map()), expected);
    // The same, asked in another way.
    let qemu = shell(&format!("qemu-img map --output=json -f raw '{uri}'")).unwrap();
    let qemu: serde_json::Value = serde_json::from_str(&qemu).unwrap();
    let data: Vec<(u64, u64)> = qemu
        .as_array()
        .unwrap()
        .iter()
        .filter(|row| row["data"] == true && row["zero"] == false)
        .map(|row| (row["start"].as_u64().unwrap(), row["length"].as_u64().unwrap()))
        .collect();
    assert_eq!(data, [(MIB, 64 << 10), (4 * MIB, 4 << 10)]);
    shell(&format!("qemu-io -f raw -c 'discard 1M 64k' -c 'write -z -u 4M 4k' '{uri}'")).unwrap();
    assert_eq!(rows(&map()), [(0, 16 * MIB, "hole,zero".to_owned())]);
}

#[test]
fn nbdcopy_brings_images_in_and_out_unchanged() {
    let size = 40 * MIB + 512;
    let daemon = serving("copy", size);
    let uri = daemon.uri("data");
    for (dense, connections) in [(false, 1), (true, 4), (false, 4), (true, 1)] {
        let folder = Folder::new("copy").unwrap();
        let from = source(&folder, size, dense);
        let to = folder.path().join("copy");
        let (from, to) = (from.display(), to.display());
        // The last image's data has to be gone where this one is sparse.
        shell(&format!("nbdcopy --connections={connections} {from} '{uri}'")).unwrap();
        shell(&format!("nbdcopy --connections={connections} '{uri}' {to} && cmp {from} {to}"))
            .unwrap();
        let used = shell(&format!("du -k {to} | cut -f1")).unwrap().trim().parse::<u64>().unwrap();
        assert!(dense || used < 40 << 9, "a sparse image came out with {used} KiB");
    }
}

#[test]
fn qemu_img_converts_and_compares() {
    let size = 32 * MIB;
    let daemon = serving("convert", size);
    let uri = daemon.uri("data");
    let folder = Folder::new("convert").unwrap();
    let from = source(&folder, size, false);
    let (from, image) = (from.display(), folder.path().join("image.qcow2"));
    let image = image.display();
    shell(&format!("qemu-img convert -n -W -m 8 -f raw -O raw {from} '{uri}'")).unwrap();
    shell(&format!("qemu-img compare -f raw -F raw {from} '{uri}'")).unwrap();
    shell(&format!("qemu-img convert -f raw -O qcow2 '{uri}' {image}")).unwrap();
    shell(&format!("qemu-img compare -f qcow2 -F raw {image} {from}")).unwrap();
    shell(&format!("qemu-img convert -n -f qcow2 -O raw {image} '{uri}'")).unwrap();
    shell(&format!("qemu-img compare -f raw -F raw {from} '{uri}'")).unwrap();
}

#[test]
fn qemu_io_finds_its_patterns() {
    let daemon = serving("patterns", 8 * MIB);
    let uri = daemon.uri("data");
    let commands = [
        "write -P 0xaa 0 1M",
        "write -f -P 0xbb 512 1024",
        "read -P 0xaa 0 512",
        "read -P 0xbb 512 1024",
        "read -P 0xaa 1536 64k",
        "write -z 4k 4k",
        "read -P 0 4k 4k",
        "read -P 0xaa 8k 8k",
        "write -z -u 256k 256k",
        "read -P 0 256k 256k",
        // Ragged edges of a discard keep what they hold.
        "discard 16896 8192",
        "read -P 0xaa 16384 512",
        "read -P 0 20480 4096",
        "read -P 0xaa 24576 512",
        "flush",
        "aio_write -P 1 2M 64k",
        "aio_write -P 2 2176k 64k",
        "aio_flush",
        "read -P 1 2M 64k",
        "read -P 2 2176k 64k",
        "read -P 0 7M 1M",
    ];
    let commands: Vec<String> = commands.iter().map(|line| format!("-c '{line}'")).collect();
    let said = shell(&format!("qemu-io -f raw {} '{uri}' 2>&1", commands.join(" "))).unwrap();
    assert!(!said.contains("failed"), "{said}");
    // A write beyond the end is refused and changes nothing.
    let beyond = shell(&format!("qemu-io -f raw -c 'write -P 9 8M 4k' '{uri}' 2>&1"));
    assert!(format!("{beyond:?}").contains("rror"), "{beyond:?}");
}

#[test]
fn fio_verifies_what_it_wrote() {
    let daemon = serving("fio", 64 * MIB);
    let uri = daemon.uri("data");
    let folder = Folder::new("fio").unwrap();
    let line = format!(
        "cd {} && fio --name=v --ioengine=nbd --uri='{uri}' --rw=randrw --bs=4k-64k --bsrange=4k-64k \
         --size=64M --io_size=48M --iodepth=32 --verify=crc32c --verify_fatal=1 --do_verify=1 \
         --fsync=64 --randseed=1 --output-format=json",
        folder.path().display()
    );
    let said = shell(&line).unwrap();
    // Notes come before the report.
    let report = &said[said.find('{').unwrap()..];
    let report: serde_json::Value = serde_json::from_str(report).unwrap();
    assert_eq!(report["jobs"][0]["error"], 0, "{report}");
    assert!(report["jobs"][0]["write"]["total_ios"].as_u64().unwrap() > 100);
}

#[test]
fn a_request_of_many_pieces_is_put_together() {
    let daemon = serving("pieces", 16 * MIB);
    let mut connection = daemon.connect("data").unwrap();
    let mut expected = vec![0; 4 << 20];
    let mut rng = fastrand::Rng::with_seed(3);
    // Every other sub-block, so that each is a piece of its own.
    for at in (0..expected.len()).step_by(8192) {
        rng.fill(&mut expected[at..at + 4096]);
        connection.write(at as u64, &expected[at..at + 4096]).unwrap();
    }
    assert!(connection.read(0, 4 << 20).unwrap() == expected);
    // The same the other way round: a write over blocks that were there and some that were not.
    rng.fill(&mut expected);
    connection.write(0, &expected).unwrap();
    assert!(connection.read(0, 4 << 20).unwrap() == expected);
    for at in (0..expected.len()).step_by(65536) {
        let piece = connection.read(at as u64, 65536).unwrap();
        assert!(piece == expected[at..at + 65536], "at {at}");
    }
}

/// The bindings belong to the system's Python, which need not be the first of the `PATH`.
const PYTHON: &str = "/usr/bin/python3";

#[test]
fn libnbd_in_python_reads_writes_and_asks() {
    let daemon = serving("python", 16 * MIB);
    let script = format!(
        r#"
import nbd
h = nbd.NBD()
h.add_meta_context(nbd.CONTEXT_BASE_ALLOCATION)
h.connect_uri("{}")
assert h.get_size() == 16 << 20
assert h.get_structured_replies_negotiated()
h.pwrite(b"x" * 8192, 1 << 20, nbd.CMD_FLAG_FUA)
assert h.pread(8192, 1 << 20) == b"x" * 8192
chunks = []
h.pread_structured(1 << 16, (1 << 20) - 4096, lambda b, o, s, e: chunks.append((o, len(b), s)) and 0 or 0)
assert sum(length for _, length, _ in chunks) == 1 << 16, chunks
h.pread_structured(1 << 16, 0, lambda b, o, s, e: 0, nbd.CMD_FLAG_DF)
runs = []
h.block_status(16 << 20, 0, lambda c, o, e, err: runs.extend(e) or 0)
extent = 256 << 10
assert runs == [1 << 20, 3, 8192, 0, extent - 8192, 2, (15 << 20) - extent, 3], runs
one = []
h.block_status(16 << 20, 0, lambda c, o, e, err: one.extend(e) or 0, nbd.CMD_FLAG_REQ_ONE)
assert len(one) == 2, one
h.zero(4096, 1 << 20, nbd.CMD_FLAG_NO_HOLE)
h.zero(4096, (1 << 20) + 4096, nbd.CMD_FLAG_FAST_ZERO)
assert h.pread(8192, 1 << 20) == bytes(8192)
h.cache(4096, 0)
h.trim(1 << 20, 1 << 20)
h.flush()
for bad in (lambda: h.pread(512, (16 << 20)), lambda: h.pwrite(b"y" * 512, 16 << 20)):
    h.set_strict_mode(0)
    try:
        bad()
    except nbd.Error as error:
        assert error.errno in ("EINVAL", "ENOSPC"), error
    else:
        raise SystemExit("a request beyond the end succeeded")
assert h.pread(512, 0) == bytes(512)
# Many requests at once, on several connections.
h.shutdown()
hs = []
for _ in range(4):
    c = nbd.NBD()
    c.connect_uri("{}")
    hs.append(c)
for turn in range(64):
    cookies = []
    for number, c in enumerate(hs):
        data = nbd.Buffer.from_bytearray(bytearray([turn + 1]) * 4096)
        cookies.append((c, c.aio_pwrite(data, (turn * 4 + number) * 4096)))
    for c, cookie in cookies:
        while not c.aio_command_completed(cookie):
            c.poll(-1)
# A flush on one covers what was answered on the others.
hs[0].flush()
for turn in range(64):
    assert hs[turn % 4].pread(16384, turn * 16384) == bytes([turn + 1]) * 16384
"#,
        daemon.uri("data"),
        daemon.uri("data")
    );
    assert!(
        tools::output(Command::new(PYTHON).args(["-c", "import nbd"])).is_ok(),
        "not run: no libnbd for Python; `cargo ci setup` installs it"
    );
    tools::output(Command::new(PYTHON).args(["-c", &script])).unwrap();
}

#[test]
fn tls_with_the_clients_of_others() {
    let folder = Folder::new("tls").unwrap();
    let pki = folder.path().join("pki");
    fs::create_dir_all(&pki).unwrap();
    // The names are those that libnbd and qemu look for.
    shell(&format!(
        "cd {} && exec 2>&1
         openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=ca -keyout ca-key.pem -out ca-cert.pem
         for who in server client; do
             openssl req -newkey rsa:2048 -nodes -subj /CN=localhost -keyout $who-key.pem -out $who.csr
             printf 'subjectAltName=DNS:localhost,IP:127.0.0.1\\n' >$who.ext
             openssl x509 -req -days 2 -in $who.csr -CA ca-cert.pem -CAkey ca-key.pem -CAcreateserial \
                 -extfile $who.ext -out $who-cert.pem
         done",
        pki.display()
    ))
    .unwrap();
    let port = tools::free_port().unwrap();
    let pem = |name: &str| pki.join(name).display().to_string();
    let tables = format!(
        "[nbd.tls]\ncertificate = {:?}\nkey = {:?}\nclient_ca = {:?}\n\
         [[nbd.listener]]\ntcp = \"127.0.0.1:{port}\"\ntls = \"required\"\n",
        pem("server-cert.pem"),
        pem("server-key.pem"),
        pem("ca-cert.pem"),
    );
    let mut settings = Settings::default();
    let mut daemon = Daemon::new("tls", &settings).unwrap();
    settings.tables = format!(
        "{tables}[[nbd.listener]]\nunix = {:?}\n",
        daemon.nbd_socket().display().to_string()
    );
    daemon.configure(&settings).unwrap();
    daemon.start().unwrap();
    daemon.add("data", 8 * MIB).unwrap();
    let pki = pki.display();
    let uri = format!("nbds://localhost:{port}/data?tls-certificates={pki}");
    let size = shell(&format!("nbdinfo --size '{uri}'")).unwrap();
    assert_eq!(size.trim(), "8388608");
    let image = source(&folder, 8 * MIB, true);
    let image = image.display();
    shell(&format!("nbdcopy --connections=2 {image} '{uri}'")).unwrap();
    let qemu = format!(
        "--object tls-creds-x509,id=t,dir={pki},endpoint=client \
         --image-opts driver=nbd,host=localhost,port={port},export=data,tls-creds=t"
    );
    let said = shell(&format!(
        "qemu-img convert {qemu} -O raw {pki}/out && cmp {image} {pki}/out; qemu-img info {qemu}"
    ));
    assert!(said.unwrap().contains("8 MiB"));
    // Without TLS there is nothing to be had here.
    let plain = shell(&format!("nbdinfo --size nbd://localhost:{port}/data 2>&1")).unwrap_err();
    assert!(!plain.to_string().contains("8388608"), "{plain}");
}

#[test]
fn file_systems_come_out_clean() {
    let daemon = serving("images", 320 * MIB);
    let uri = daemon.uri("data");
    let folder = Folder::new("images").unwrap();
    let path = folder.path().display();
    let content = tools::workspace_root().join("docs");
    let content = content.display();
    let make = [
        // Some versions of xfs refuse less than 300 MiB.
        format!("mkfs.ext4 -q -d {content} {path}/image"),
        format!("mkfs.xfs -q {path}/image"),
    ];
    let check = ["e2fsck -fn", "xfs_repair -n -f"];
    for (make, check) in make.iter().zip(check) {
        shell(&format!("truncate -s 320M {path}/image && {make}")).unwrap();
        shell(&format!("nbdcopy {path}/image '{uri}' && rm {path}/image")).unwrap();
        shell(&format!("nbdcopy '{uri}' {path}/out && {check} {path}/out 2>&1")).unwrap();
        if check.starts_with("e2fsck") {
            let dump = format!("debugfs -R 'rdump / {path}/files' {path}/out 2>&1");
            shell(&format!("mkdir {path}/files && {dump}")).unwrap();
            shell(&format!("rmdir {path}/files/lost+found; diff -r {content} {path}/files"))
                .unwrap();
        }
        shell(&format!("rm {path}/out")).unwrap();
    }
}

#[test]
fn import_and_export_are_what_other_tools_read() {
    let size = 24 * MIB;
    let mut daemon = Daemon::new("import", &Settings::default()).unwrap();
    daemon.start().unwrap();
    let folder = Folder::new("import").unwrap();
    let from = source(&folder, size, false);
    let to = folder.path().join("out");
    let words = |path: &std::path::Path| path.to_str().unwrap().to_owned();
    daemon.cli(&["import", &words(&from), "data"]).unwrap();
    let uri = daemon.uri("data");
    shell(&format!("qemu-img compare -f raw -F raw {} '{uri}'", from.display())).unwrap();
    daemon.cli(&["export", "data", &words(&to)]).unwrap();
    shell(&format!("cmp {} {}", from.display(), to.display())).unwrap();
}
