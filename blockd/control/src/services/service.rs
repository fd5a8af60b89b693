//! The edge to gRPC: requests are checked and carried out here, and errors become statuses.

mod requests;

use std::future::Future;
use std::pin::Pin;

use blockd_api::v1;
use blockd_api::v1::control_server::Control as Calls;
use blockd_media::error::Error;
use blockd_media::units::{from_wire, to_wire};
use tokio::sync::mpsc;
use tokio_stream::Stream;
use tokio_stream::wrappers::{ReceiverStream, UnboundedReceiverStream};
use tonic::{Request, Response, Status};

use super::Control;
use super::dead_hosts::Steps;

use requests::known_pool;
pub(super) use requests::wanted_pool;

/// Messages that wait for a client of a stream. Further messages wait in the hub.
const STREAM_DEPTH: usize = 16;

type Answer<T> = Result<Response<T>, Status>;
type Messages<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// Carries a call out to its end, also when the client goes away in the middle: a change is not
/// left half done.
async fn whole<T: Send + 'static>(
    call: impl Future<Output = Result<T, Error>> + Send + 'static,
) -> Answer<T> {
    let result = tokio::spawn(call).await.unwrap_or_else(|error| {
        Err(Error::Unexpected { what: "the call ended".to_owned(), problem: error.to_string() })
    });
    match result {
        Ok(answer) => Ok(Response::new(answer)),
        Err(error) => {
            tracing::debug!(%error, "a call was refused");
            Err(error.to_status())
        }
    }
}

/// Carries a call out to its end, also when the client goes away, with its steps as they happen.
fn in_steps<F>(call: impl FnOnce(Steps) -> F) -> Messages<v1::HostStep>
where
    F: Future<Output = Result<v1::HostEnd, Error>> + Send + 'static,
{
    let (send, receive) = mpsc::unbounded_channel();
    let work = call(Steps::new(send.clone()));
    tokio::spawn(async move {
        let ended = work.await.map(|end| v1::HostStep { end: Some(end), ..Default::default() });
        let _ = send.send(ended.map_err(|error| error.to_status()));
    });
    Box::pin(UnboundedReceiverStream::new(receive))
}

#[tonic::async_trait]
impl Calls for Control {
    type PoolExtentsStream = Messages<v1::PoolExtentsResponse>;
    type DiffVolumeStream = Messages<v1::DiffVolumeResponse>;
    type EventsStream = Messages<v1::Event>;
    type DeclareHostDeadStream = Messages<v1::HostStep>;
    type ForgetHostStream = Messages<v1::HostStep>;

    async fn version(&self, _: Request<v1::VersionRequest>) -> Answer<v1::VersionResponse> {
        Ok(Response::new(v1::VersionResponse {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            started_unix_seconds: to_wire(self.0.started_unix_seconds),
            nbd_addresses: self.0.nbd.read().iter().map(|address| address.uri("")).collect(),
            ready: self.is_ready(),
        }))
    }

    async fn list_pools(&self, _: Request<v1::ListPoolsRequest>) -> Answer<v1::ListPoolsResponse> {
        let control = self.clone();
        whole(async move {
            let mut pools = Vec::new();
            for known in control.known_pools() {
                pools.push(control.describe_pool(&known).await?);
            }
            pools.extend(control.describe_direct(None).await?);
            pools.sort_by_key(|pool| !pool.is_default);
            Ok(v1::ListPoolsResponse { pools })
        })
        .await
    }

    async fn get_pool(&self, asked: Request<v1::GetPoolRequest>) -> Answer<v1::GetPoolResponse> {
        let (control, asked) = (self.clone(), asked.into_inner());
        whole(async move {
            let pool = Some(control.kind(&asked.name).describe(&asked.name).await?);
            Ok(v1::GetPoolResponse { pool })
        })
        .await
    }

    async fn create_pool(
        &self,
        asked: Request<v1::CreatePoolRequest>,
    ) -> Answer<v1::CreatePoolResponse> {
        let (control, asked) = (self.clone(), asked.into_inner());
        whole(async move {
            let known = control.0.pools.read().get(&asked.name).map(|known| known.config.clone());
            let config = match known.filter(|_| asked.replace_missing) {
                Some(known) => known_pool(known, &asked)?,
                None => wanted_pool(&control, &asked)?,
            };
            let name = config.name.clone();
            let changed = control.create_pool(config, asked.replace_missing).await?;
            let pool = control.describe_pool(&control.known(&name)?).await?;
            Ok(v1::CreatePoolResponse { changed, pool: Some(pool) })
        })
        .await
    }

    async fn open_pool(&self, asked: Request<v1::OpenPoolRequest>) -> Answer<v1::OpenPoolResponse> {
        let (control, asked) = (self.clone(), asked.into_inner());
        whole(async move {
            let changed = control.reopen_pool(&asked.name).await?;
            let pool = Some(control.kind(&asked.name).describe(&asked.name).await?);
            Ok(v1::OpenPoolResponse { changed, pool })
        })
        .await
    }

    async fn close_pool(
        &self,
        asked: Request<v1::ClosePoolRequest>,
    ) -> Answer<v1::ClosePoolResponse> {
        let (control, asked) = (self.clone(), asked.into_inner());
        whole(async move { control.close_by_call(asked).await }).await
    }

    async fn delete_pool(
        &self,
        asked: Request<v1::DeletePoolRequest>,
    ) -> Answer<v1::DeletePoolResponse> {
        let (control, asked) = (self.clone(), asked.into_inner());
        whole(async move { control.delete_pool(asked).await }).await
    }

    async fn export_pool(
        &self,
        asked: Request<v1::ExportPoolRequest>,
    ) -> Answer<v1::ExportPoolResponse> {
        let (control, asked) = (self.clone(), asked.into_inner());
        whole(async move { control.export_pool(asked).await }).await
    }

    async fn rename_pool(
        &self,
        asked: Request<v1::RenamePoolRequest>,
    ) -> Answer<v1::RenamePoolResponse> {
        let (control, asked) = (self.clone(), asked.into_inner());
        whole(async move { control.rename_pool(asked).await }).await
    }

    async fn import_pool(
        &self,
        asked: Request<v1::ImportPoolRequest>,
    ) -> Answer<v1::ImportPoolResponse> {
        let (control, asked) = (self.clone(), asked.into_inner());
        whole(async move { control.import_pool(asked).await }).await
    }

    async fn pool_extents(
        &self,
        asked: Request<v1::PoolExtentsRequest>,
    ) -> Answer<Self::PoolExtentsStream> {
        let handle = self.pool(&asked.into_inner().pool)?;
        let messages = self.describe_extents(&handle).await?;
        let stream: Self::PoolExtentsStream =
            Box::pin(tokio_stream::iter(messages.into_iter().map(Ok)));
        Ok(Response::new(stream))
    }

    async fn grow_pool(&self, asked: Request<v1::GrowPoolRequest>) -> Answer<v1::GrowPoolResponse> {
        let (control, asked) = (self.clone(), asked.into_inner());
        whole(async move {
            let size = Some(from_wire(asked.wanted_bytes, 0)?).filter(|&size| size > 0);
            let device = usize::try_from(asked.device).unwrap_or(usize::MAX);
            let gained = control.grow_pool(&asked.name, device, size).await?;
            let pool = control.describe_pool(&control.known(&asked.name)?).await?;
            let gained_bytes = to_wire(gained);
            Ok(v1::GrowPoolResponse { changed: gained > 0, gained_bytes, pool: Some(pool) })
        })
        .await
    }

    async fn fold_pool(&self, asked: Request<v1::FoldPoolRequest>) -> Answer<v1::FoldPoolResponse> {
        let (control, asked) = (self.clone(), asked.into_inner());
        whole(async move { control.fold_pool(&asked.name, asked.begin).await }).await
    }

    async fn add_pool_device(
        &self,
        asked: Request<v1::AddPoolDeviceRequest>,
    ) -> Answer<v1::AddPoolDeviceResponse> {
        let (control, asked) = (self.clone(), asked.into_inner());
        whole(async move { control.add_pool_device(asked).await }).await
    }

    async fn remove_pool_device(
        &self,
        asked: Request<v1::RemovePoolDeviceRequest>,
    ) -> Answer<v1::RemovePoolDeviceResponse> {
        let (control, asked) = (self.clone(), asked.into_inner());
        whole(async move { control.remove_pool_device(&asked).await }).await
    }

    async fn rebalance_pool(
        &self,
        asked: Request<v1::RebalancePoolRequest>,
    ) -> Answer<v1::RebalancePoolResponse> {
        let (control, asked) = (self.clone(), asked.into_inner());
        whole(async move { control.rebalance_pool(&asked).await }).await
    }

    async fn set_pool_feature(
        &self,
        asked: Request<v1::SetPoolFeatureRequest>,
    ) -> Answer<v1::SetPoolFeatureResponse> {
        let (control, asked) = (self.clone(), asked.into_inner());
        whole(async move { control.set_pool_feature(&asked).await }).await
    }

    async fn configure_volume(
        &self,
        asked: Request<v1::ConfigureVolumeRequest>,
    ) -> Answer<v1::ConfigureVolumeResponse> {
        let (control, asked) = (self.clone(), asked.into_inner());
        whole(async move {
            let (changed, volume) = control.configure_volume(&asked).await?;
            Ok(v1::ConfigureVolumeResponse { changed, volume: Some(volume) })
        })
        .await
    }

    async fn create_volume(
        &self,
        asked: Request<v1::CreateVolumeRequest>,
    ) -> Answer<v1::CreateVolumeResponse> {
        let (control, asked) = (self.clone(), asked.into_inner());
        whole(async move { control.kind(&asked.pool).create_volume(asked).await }).await
    }

    async fn add_volume(
        &self,
        asked: Request<v1::AddVolumeRequest>,
    ) -> Answer<v1::AddVolumeResponse> {
        let (control, asked) = (self.clone(), asked.into_inner());
        whole(async move {
            let pool = asked.create.as_ref().map_or("", |create| &create.pool);
            control.kind(pool).add_volume(asked).await
        })
        .await
    }

    async fn delete_volume(
        &self,
        asked: Request<v1::DeleteVolumeRequest>,
    ) -> Answer<v1::DeleteVolumeResponse> {
        let (control, asked) = (self.clone(), asked.into_inner());
        whole(async move { control.kind(&asked.pool).delete_volume(asked).await }).await
    }

    async fn get_volume(
        &self,
        asked: Request<v1::GetVolumeRequest>,
    ) -> Answer<v1::GetVolumeResponse> {
        let (control, asked) = (self.clone(), asked.into_inner());
        whole(async move {
            let volume = Some(control.kind(&asked.pool).get_volume(asked).await?);
            Ok(v1::GetVolumeResponse { volume })
        })
        .await
    }

    async fn list_volumes(
        &self,
        asked: Request<v1::ListVolumesRequest>,
    ) -> Answer<v1::ListVolumesResponse> {
        let (control, asked) = (self.clone(), asked.into_inner());
        whole(async move {
            if !asked.pool.is_empty() {
                return control.kind(&asked.pool).list_volumes(&asked).await;
            }
            let mut all = v1::ListVolumesResponse::default();
            for kind in control.kinds() {
                let of_kind = kind.list_volumes(&asked).await?;
                all.volumes.extend(of_kind.volumes);
                all.releasing.extend(of_kind.releasing);
            }
            Ok(all)
        })
        .await
    }

    async fn resize_volume(
        &self,
        asked: Request<v1::ResizeVolumeRequest>,
    ) -> Answer<v1::ResizeVolumeResponse> {
        let (control, asked) = (self.clone(), asked.into_inner());
        whole(async move { control.kind(&asked.pool).resize_volume(asked).await }).await
    }

    async fn create_snapshots(
        &self,
        asked: Request<v1::CreateSnapshotsRequest>,
    ) -> Answer<v1::CreateSnapshotsResponse> {
        let (control, asked) = (self.clone(), asked.into_inner());
        whole(async move {
            let (changed, snapshots) =
                control.create_snapshots(&asked.pool, &asked.members, &asked.labels).await?;
            Ok(v1::CreateSnapshotsResponse { changed, snapshots })
        })
        .await
    }

    #[expect(deprecated, reason = "older clients send size_gb")]
    async fn clone_volume(
        &self,
        asked: Request<v1::CloneVolumeRequest>,
    ) -> Answer<v1::CloneVolumeResponse> {
        let (control, asked) = (self.clone(), asked.into_inner());
        whole(async move {
            let size = from_wire(asked.size_bytes, asked.size_gb)?;
            let size = (size != 0).then_some(size);
            let v1::CloneVolumeRequest { pool, snapshot, name, labels, .. } = &asked;
            let (changed, volume) =
                control.clone_volume(pool, snapshot, name, size, labels).await?;
            Ok(v1::CloneVolumeResponse { changed, volume: Some(volume) })
        })
        .await
    }

    async fn clone_volumes(
        &self,
        asked: Request<v1::CloneVolumesRequest>,
    ) -> Answer<v1::CloneVolumesResponse> {
        let (control, asked) = (self.clone(), asked.into_inner());
        whole(async move { control.clone_volumes(&asked).await }).await
    }

    async fn rollback_volume(
        &self,
        asked: Request<v1::RollbackVolumeRequest>,
    ) -> Answer<v1::RollbackVolumeResponse> {
        let (control, asked) = (self.clone(), asked.into_inner());
        whole(async move {
            let v1::RollbackVolumeRequest { name, pool, snapshot, force } = asked;
            control.rollback_volume(&pool, &name, &snapshot, force).await
        })
        .await
    }

    async fn reset_volume(
        &self,
        asked: Request<v1::ResetVolumeRequest>,
    ) -> Answer<v1::ResetVolumeResponse> {
        let (control, asked) = (self.clone(), asked.into_inner());
        whole(async move { control.reset_volume(&asked).await }).await
    }

    async fn rename_volume(
        &self,
        asked: Request<v1::RenameVolumeRequest>,
    ) -> Answer<v1::RenameVolumeResponse> {
        let (control, asked) = (self.clone(), asked.into_inner());
        whole(async move { control.rename_volume(&asked).await }).await
    }

    async fn diff_volume(
        &self,
        asked: Request<v1::DiffVolumeRequest>,
    ) -> Answer<Self::DiffVolumeStream> {
        let receive = Control::diff_volume(self, asked.get_ref()).await?;
        let stream: Self::DiffVolumeStream = Box::pin(ReceiverStream::new(receive));
        Ok(Response::new(stream))
    }

    async fn space(&self, asked: Request<v1::SpaceRequest>) -> Answer<v1::SpaceResponse> {
        let (control, asked) = (self.clone(), asked.into_inner());
        whole(async move { control.describe_space(&asked).await }).await
    }

    async fn attach_volume(
        &self,
        asked: Request<v1::AttachVolumeRequest>,
    ) -> Answer<v1::AttachVolumeResponse> {
        let (control, asked) = (self.clone(), asked.into_inner());
        whole(async move { control.kind(&asked.pool).attach_volume(asked).await }).await
    }

    async fn detach_volume(
        &self,
        asked: Request<v1::DetachVolumeRequest>,
    ) -> Answer<v1::DetachVolumeResponse> {
        let (control, asked) = (self.clone(), asked.into_inner());
        whole(async move { control.kind(&asked.pool).detach_volume(asked).await }).await
    }

    async fn recover_devices(
        &self,
        asked: Request<v1::RecoverDevicesRequest>,
    ) -> Answer<v1::RecoverDevicesResponse> {
        let (control, asked) = (self.clone(), asked.into_inner());
        whole(async move {
            if !asked.pool.is_empty() {
                control.known(&asked.pool)?;
            }
            if !asked.name.is_empty() {
                control.get_volume(&asked.pool, &asked.name).await?;
            }
            let changed = control.recover(&asked.pool, &asked.name).await? > 0;
            let volumes = control.with_device(&asked.pool, &asked.name).await?;
            Ok(v1::RecoverDevicesResponse { changed, volumes })
        })
        .await
    }

    async fn list_connections(
        &self,
        asked: Request<v1::ListConnectionsRequest>,
    ) -> Answer<v1::ListConnectionsResponse> {
        let asked = asked.into_inner();
        self.check_pool(&asked.pool)?;
        let connections = self.describe_connections(&asked.pool, &asked.volume);
        Ok(Response::new(v1::ListConnectionsResponse { connections }))
    }

    async fn stats(&self, asked: Request<v1::StatsRequest>) -> Answer<v1::StatsResponse> {
        let asked = asked.into_inner();
        Ok(Response::new(self.describe_stats(&asked.pool, &asked.volume)?))
    }

    async fn list_nodes(&self, _: Request<v1::ListNodesRequest>) -> Answer<v1::ListNodesResponse> {
        let control = self.clone();
        whole(async move { Ok(v1::ListNodesResponse { nodes: control.describe_nodes().await? }) })
            .await
    }

    async fn node_status(
        &self,
        asked: Request<v1::NodeStatusRequest>,
    ) -> Answer<v1::NodeStatusResponse> {
        let (control, asked) = (self.clone(), asked.into_inner());
        whole(async move { control.describe_node_status(&asked.pool).await }).await
    }

    async fn add_volume_group(
        &self,
        asked: Request<v1::AddVolumeGroupRequest>,
    ) -> Answer<v1::AddVolumeGroupResponse> {
        let (control, asked) = (self.clone(), asked.into_inner());
        whole(async move {
            let changed = control.add_group(&asked).await?;
            let group = control.describe_group(control.group(&asked.name)?).await;
            Ok(v1::AddVolumeGroupResponse { changed, group: Some(group) })
        })
        .await
    }

    async fn remove_volume_group(
        &self,
        asked: Request<v1::RemoveVolumeGroupRequest>,
    ) -> Answer<v1::RemoveVolumeGroupResponse> {
        let (control, asked) = (self.clone(), asked.into_inner());
        whole(async move {
            let changed = control.remove_group(&asked.name).await?;
            Ok(v1::RemoveVolumeGroupResponse { changed })
        })
        .await
    }

    async fn list_volume_groups(
        &self,
        asked: Request<v1::ListVolumeGroupsRequest>,
    ) -> Answer<v1::ListVolumeGroupsResponse> {
        let (control, asked) = (self.clone(), asked.into_inner());
        whole(async move {
            let groups = control.list_groups(&asked).await?;
            Ok(v1::ListVolumeGroupsResponse { groups })
        })
        .await
    }

    async fn create_cell(
        &self,
        asked: Request<v1::CreateCellRequest>,
    ) -> Answer<v1::CreateCellResponse> {
        let (control, asked) = (self.clone(), asked.into_inner());
        whole(async move { control.create_cell(asked).await }).await
    }

    async fn take_cell(&self, asked: Request<v1::TakeCellRequest>) -> Answer<v1::TakeCellResponse> {
        let (control, asked) = (self.clone(), asked.into_inner());
        whole(async move { control.take_cell(asked).await }).await
    }

    async fn stand_by(&self, asked: Request<v1::StandByRequest>) -> Answer<v1::StandByResponse> {
        let (control, asked) = (self.clone(), asked.into_inner());
        whole(async move { control.stand_by(asked).await }).await
    }

    async fn release_cell(
        &self,
        asked: Request<v1::ReleaseCellRequest>,
    ) -> Answer<v1::ReleaseCellResponse> {
        let (control, asked) = (self.clone(), asked.into_inner());
        whole(async move { control.release_cell(asked).await }).await
    }

    async fn delete_cell(
        &self,
        asked: Request<v1::DeleteCellRequest>,
    ) -> Answer<v1::DeleteCellResponse> {
        let (control, asked) = (self.clone(), asked.into_inner());
        whole(async move { control.delete_cell(asked).await }).await
    }

    async fn lose_volume_group(
        &self,
        asked: Request<v1::LoseVolumeGroupRequest>,
    ) -> Answer<v1::LoseVolumeGroupResponse> {
        let (control, asked) = (self.clone(), asked.into_inner());
        whole(async move { control.lose_group(&asked.name).await }).await
    }

    async fn declare_host_dead(
        &self,
        asked: Request<v1::DeclareHostDeadRequest>,
    ) -> Answer<Self::DeclareHostDeadStream> {
        let (control, asked) = (self.clone(), asked.into_inner());
        let call = |steps| async move { control.declare_host_dead(&asked, &steps).await };
        Ok(Response::new(in_steps(call)))
    }

    async fn forget_host(
        &self,
        asked: Request<v1::ForgetHostRequest>,
    ) -> Answer<Self::ForgetHostStream> {
        let (control, asked) = (self.clone(), asked.into_inner());
        let call = |steps| async move { control.forget_host(&asked, &steps).await };
        Ok(Response::new(in_steps(call)))
    }

    async fn health(&self, asked: Request<v1::HealthRequest>) -> Answer<v1::HealthResponse> {
        let (control, asked) = (self.clone(), asked.into_inner());
        whole(async move {
            if !asked.pool.is_empty() || !asked.volume.is_empty() {
                return control.kind(&asked.pool).health(&asked).await;
            }
            let mut all = v1::HealthResponse::default();
            for kind in control.kinds() {
                let of_kind = kind.health(&asked).await?;
                all.pools.extend(of_kind.pools);
                all.volumes.extend(of_kind.volumes);
            }
            Ok(all)
        })
        .await
    }

    async fn acknowledge_health(
        &self,
        asked: Request<v1::AcknowledgeHealthRequest>,
    ) -> Answer<v1::AcknowledgeHealthResponse> {
        let (control, asked) = (self.clone(), asked.into_inner());
        whole(async move {
            let changed = control.acknowledge_health(&asked.pool, &asked.volume)?;
            Ok(v1::AcknowledgeHealthResponse { changed })
        })
        .await
    }

    async fn events(&self, asked: Request<v1::EventsRequest>) -> Answer<Self::EventsStream> {
        let asked = asked.into_inner();
        self.check_pool(&asked.pool)?;
        let mut reader = self.events().reader(asked.replay, asked.pool);
        let (send, receive) = mpsc::channel(STREAM_DEPTH);
        tokio::spawn(async move {
            loop {
                let event = tokio::select! {
                    event = reader.next() => event,
                    () = send.closed() => None,
                };
                let Some(event) = event else { break };
                if send.send(Ok(event)).await.is_err() {
                    break;
                }
            }
        });
        let stream: Self::EventsStream = Box::pin(ReceiverStream::new(receive));
        Ok(Response::new(stream))
    }
}
