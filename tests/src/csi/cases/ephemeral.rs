//! Ephemeral volumes, inline and generic: the rows P42 and P43.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use anyhow::{Result, ensure};
use blockd_csi::proto::NodePublishVolumeRequest;
use blockd_csi::proto::volume_capability::access_mode::Mode;
use tonic::Code;

use crate::csi::case::Need::{Host, Rows};
use crate::csi::case::{STAGE, cases};
use crate::csi::cx::{Cx, mounted_at, refused};

cases! { [STAGE, Host, Rows]
    an_ephemeral_volume_comes_with_publish_and_goes_with_unpublish;
    an_ephemeral_volume_again_is_the_same;
    each_pod_has_an_ephemeral_volume_of_its_own;
    an_unknown_key_of_an_ephemeral_volume_is_refused;
    an_ephemeral_volume_that_is_too_large_is_refused_and_leaves_nothing;
    an_ephemeral_volume_is_as_large_as_asked;
    a_generic_ephemeral_volume_stays_until_its_claim_is_deleted;
}

/// As the kubelet asks for one: the id is its own, and the pod's description is in the context.
fn request(cx: &mut Cx<'_>, more: &[(&str, &str)]) -> Result<NodePublishVolumeRequest> {
    let mut context = HashMap::from(
        [
            ("csi.storage.k8s.io/ephemeral", "true"),
            ("csi.storage.k8s.io/pod.name", "pod"),
            ("csi.storage.k8s.io/pod.namespace", "default"),
            ("csi.storage.k8s.io/pod.uid", "5f0c4a8e-0000-4000-8000-000000000000"),
            ("csi.storage.k8s.io/serviceAccount.name", "default"),
        ]
        .map(|(key, value)| (key.to_owned(), value.to_owned())),
    );
    let own = cx.offers().name.clone();
    for &(key, value) in more {
        context.insert(key.replace("DRIVER", &own), value.to_owned());
    }
    let digits: String = (0..16).map(|_| format!("{:04x}", fastrand::u16(..))).collect();
    Ok(NodePublishVolumeRequest {
        volume_id: format!("csi-{digits}"),
        target_path: cx.target()?,
        volume_capability: Some(cx.mount(Mode::SingleNodeWriter)),
        volume_context: context,
        ..Default::default()
    })
}

/// Row: P42.
fn an_ephemeral_volume_comes_with_publish_and_goes_with_unpublish(cx: &mut Cx<'_>) -> Result<()> {
    let request = request(cx, &[("size", "64Mi")])?;
    cx.publish(&request)?;
    ensure!(mounted_at(&request.target_path)?.is_some(), "nothing is mounted");
    fs::write(Path::new(&request.target_path).join("file"), b"for now")?;
    for _ in 0..3 {
        cx.unpublish(&request.volume_id, &request.target_path)?;
    }
    ensure!(!Path::new(&request.target_path).exists(), "the target is still there");
    // Its data is gone with it.
    cx.publish(&request)?;
    ensure!(!Path::new(&request.target_path).join("file").exists(), "the file is still there");
    Ok(())
}

/// Row: P42.
fn an_ephemeral_volume_again_is_the_same(cx: &mut Cx<'_>) -> Result<()> {
    let request = request(cx, &[("size", "64Mi")])?;
    cx.publish(&request)?;
    let file = Path::new(&request.target_path).join("file");
    fs::write(&file, b"for now")?;
    for _ in 0..3 {
        cx.publish(&request)?;
    }
    ensure!(fs::read(&file)? == b"for now", "another file");
    Ok(())
}

/// Row: P42.
fn each_pod_has_an_ephemeral_volume_of_its_own(cx: &mut Cx<'_>) -> Result<()> {
    let (first, second) = (request(cx, &[])?, request(cx, &[])?);
    cx.publish(&first)?;
    cx.publish(&second)?;
    fs::write(Path::new(&first.target_path).join("file"), b"mine")?;
    ensure!(!Path::new(&second.target_path).join("file").exists(), "one volume for both");
    Ok(())
}

/// Row: P42.
fn an_unknown_key_of_an_ephemeral_volume_is_refused(cx: &mut Cx<'_>) -> Result<()> {
    for (key, value) in [("no-such-key", "1"), ("size", "much"), ("size", "-1"), ("size", "16Ei")] {
        let request = request(cx, &[(key, value)])?;
        let codes = [Code::InvalidArgument, Code::OutOfRange];
        let status = crate::csi::cx::refused_as(cx.publish(&request), &codes)?;
        crate::csi::cx::says(&status, &[key])?;
        ensure!(mounted_at(&request.target_path)?.is_none(), "it is mounted");
    }
    Ok(())
}

/// Row: P42.
fn an_ephemeral_volume_that_is_too_large_is_refused_and_leaves_nothing(
    cx: &mut Cx<'_>,
) -> Result<()> {
    let request = request(cx, &[("size", "1Pi")])?;
    refused(cx.publish(&request), Code::ResourceExhausted)?;
    ensure!(mounted_at(&request.target_path)?.is_none(), "it is mounted");
    cx.unpublish(&request.volume_id, &request.target_path)?;
    ensure!(!Path::new(&request.target_path).exists(), "the target is there");
    Ok(())
}

/// Row: P42.
fn an_ephemeral_volume_is_as_large_as_asked(cx: &mut Cx<'_>) -> Result<()> {
    let request = request(cx, &[("size", "96Mi")])?;
    cx.publish(&request)?;
    let stat = nix::sys::statvfs::statvfs(request.target_path.as_str())?;
    let total = stat.blocks() * stat.fragment_size();
    ensure!(total > 64 << 20 && total <= 96 << 20, "{total} bytes");
    Ok(())
}

/// Row: P43.
fn a_generic_ephemeral_volume_stays_until_its_claim_is_deleted(cx: &mut Cx<'_>) -> Result<()> {
    let mut request = cx.request_with("csi.storage.k8s.io/pvc/name", "pod-scratch");
    for (key, value) in [("pvc/namespace", "default"), ("pv/name", "pvc-5f0c4a8e")] {
        request.parameters.insert(format!("csi.storage.k8s.io/{key}"), value.to_owned());
    }
    let volume = cx.create(&request)?;
    let capability = cx.mount(Mode::SingleNodeWriter);
    let staged = cx.stage_volume(&volume, capability)?;
    let target = cx.target()?;
    let mut publish = staged.publish(&target);
    // The kubelet adds these for drivers that have both lives of a volume.
    for (key, value) in [("ephemeral", "false"), ("pod.name", "pod"), ("pod.namespace", "default")]
    {
        publish.volume_context.insert(format!("csi.storage.k8s.io/{key}"), value.to_owned());
    }
    cx.publish(&publish)?;
    fs::write(Path::new(&target).join("file"), b"kept")?;
    cx.unpublish(&staged.id, &target)?;
    cx.publish(&publish)?;
    ensure!(fs::read(Path::new(&target).join("file"))? == b"kept", "another file");
    cx.unpublish(&staged.id, &target)?;
    cx.unstage(&staged.id, staged.path())?;
    cx.delete(&staged.id)?;
    refused(cx.publish(&publish), Code::NotFound).map(|_| ())
}
