-- Fetches the data of a job to its site before it starts, and saves what it left behind: BurstBufferType=burst_buffer/lua.
local towline = dofile("/etc/slurm/towline.lua")

-- What a function of a burst buffer returns: Slurm takes no second value but a message.
local function outcome(problem)
   if problem then return slurm.ERROR, problem end
   return slurm.SUCCESS
end

local function wanted(job_script)
   return towline.directives(towline.contents(job_script))
end

-- File about the commitment of a job: the id of its hint, or `-` before there is one, its site and its user.
local function record(job_id)
   return towline.jobs .. "/" .. string.match(job_id, "^%d+$")
end

local function committed(job_id)
   return string.match(towline.contents(record(job_id)) or "", "^(h_%x+) (%S+)")
end

local function write_record(job_id, id, site, user)
   local file = io.open(record(job_id), "w")
   if not file then return false end
   file:write(id, " ", site, " ", user, "\n")
   file:close()
   return true
end

-- Why no more jobs of a user may hold inputs, once the record of the job is written.
local function beyond(user)
   local _, said = towline.run({ "grep", "-rhs", "-e", "^", towline.jobs })
   local all, own = 0, 0
   for _, holder in string.gmatch(said, "(%S+ %S+) ?([^\n]*)\n") do
      all = all + 1
      if holder == user then own = own + 1 end
   end
   local most = math.ceil(towline.held_names / 2)
   if own > most then return most .. " jobs of " .. user .. " hold inputs, which is half of held_names" end
   if all > towline.held_names then return towline.held_names .. " jobs hold inputs, which is held_names" end
end

-- A field of a job. One at a time: users choose names of jobs, which could be taken for another field.
local function field(job_id, name)
   local ok, said = towline.run({ towline.squeue, "--noheader", "--states=all", "--jobs", job_id, "--Format", name .. ":1024" })
   return ok and string.match(said, "^%s*(.-)%s*$") or nil
end

-- Name and home folder of the user of a job. Root has no jobs with burst buffers.
local function user_of(job_id)
   local uid = string.match(field(job_id, "UserID") or "", "^%d+$")
   if not uid or uid == "0" then return nil end
   local ok, said = towline.run({ "getent", "passwd", uid })
   if not ok then return nil end
   return string.match(said, "^([^:]+):[^:]*:" .. uid .. ":[^:]*:[^:]*:([^:]*):")
end

-- Site of a job, as job_submit.lua has left it: users cannot write there.
local function site_of(job_id)
   return string.match(field(job_id, "admin_comment") or "", "^towline:(%S+)$")
end

-- Last line of an error, without what would break a message of Slurm.
local function short(said)
   return string.sub(string.gsub(string.gsub(said, "%s+$", ""), "[%c]+", " "), 1, 400)
end

-- Synchronous.
function slurm_bb_job_process(job_script)
   local _, problem = wanted(job_script)
   return outcome(problem)
end

-- Synchronous. Caches have quotas of their own.
function slurm_bb_pools()
   return slurm.SUCCESS
end

function slurm_bb_setup(job_id)
   return slurm.SUCCESS
end

-- Holds and fetches the inputs at the site of the job; ends once all of them are there.
function slurm_bb_data_in(job_id, job_script)
   local job, problem = wanted(job_script)
   if not job or not job.stage_in then return outcome(problem) end
   local user, site = user_of(job_id), site_of(job_id)
   if not user or not site then return slurm.ERROR, "towline: the job has no user or site: submit it again" end
   for _, name in ipairs(job.inputs) do
      local hint
      hint, problem = towline.hint(name, user)
      if not hint then return slurm.ERROR, "towline: " .. problem end
   end
   -- Of a try before, after which the job was held and released.
   local before, there = committed(job_id)
   if before then towline.run(towline.arguments({ "hint", "--end", before, "--at", there })) end
   -- Before the commit, so that jobs that start together count each other.
   if not write_record(job_id, "-", site, user) then return slurm.ERROR, "towline: cannot write to " .. towline.jobs end
   problem = beyond(user)
   if problem then
      os.remove(record(job_id))
      return slurm.ERROR, "towline: " .. problem .. ": release the job when others have ended"
   end
   local words = { "hint", "--json", "--sites", towline.sites, "--commit=" .. site, "--lease", job.lease or towline.lease, "--" }
   for _, name in ipairs(job.inputs) do table.insert(words, name) end
   local ok, said = towline.run(towline.arguments(words))
   local id = string.match(said, '"hint_id":"(h_%x+)"')
   if not ok or not id then
      os.remove(record(job_id))
      return slurm.ERROR, "towline: " .. short(said)
   end
   -- Before the wait, so that a job that is cancelled meanwhile releases them.
   if not write_record(job_id, id, site, user) then return slurm.ERROR, "towline: cannot write to " .. towline.jobs end
   ok, said = towline.run(towline.arguments({ "hint", "--await", id, "--at", site }))
   if not ok then return slurm.ERROR, "towline: " .. short(said) end
   return slurm.SUCCESS
end

-- Required by later versions of Slurm: slurm_bb_data_in has waited.
function slurm_bb_test_data_in(job_id)
   return slurm.SUCCESS
end

function slurm_bb_real_size(job_id)
   return slurm.SUCCESS
end

-- Synchronous. The lines are variables of the job.
function slurm_bb_paths(job_id, job_script, path_file)
   local id, site = committed(job_id)
   if not id then return slurm.SUCCESS end
   local file = io.open(path_file, "w")
   if not file then return slurm.ERROR, "towline: cannot write " .. path_file end
   file:write("TOWLINE_SITE=", site, "\n", "TOWLINE_HINT=", id, "\n")
   file:close()
   return slurm.SUCCESS
end

function slurm_bb_pre_run(job_id)
   return slurm.SUCCESS
end

function slurm_bb_post_run(job_id)
   return slurm.SUCCESS
end

-- Saves a folder that this machine sees, as the user of the job and with that user's settings.
function slurm_bb_data_out(job_id, job_script)
   local job, problem = wanted(job_script)
   if not job or not job.from then return outcome(problem) end
   local user, home = user_of(job_id)
   if not user then return slurm.ERROR, "towline: the job has no user who may save" end
   -- Nothing of slurmctld's environment is for that user.
   local ok, said = towline.run({
      "runuser", "-u", user, "--", "env", "-i", "PATH=/usr/local/bin:/usr/bin:/bin", "HOME=" .. home, "USER=" .. user,
      "TOWLINE_REPO=" .. towline.repository, towline.command, "save", "--", job.from, job.to
   })
   if not ok then return slurm.ERROR, "towline: " .. short(said) end
   return slurm.SUCCESS
end

function slurm_bb_test_data_out(job_id)
   return slurm.SUCCESS
end

-- Releases the inputs. They stay in the cache as long as there is space.
function slurm_bb_job_teardown(job_id, job_script, hurry)
   local id, site = committed(job_id)
   if not id then
      os.remove(record(job_id))
      return slurm.SUCCESS
   end
   local ok, said = towline.run(towline.arguments({ "hint", "--end", id, "--at", site }))
   if not ok then slurm.log_info("towline: the inputs of job %s are held until their lease ends: %s", job_id, short(said)) end
   os.remove(record(job_id))
   return slurm.SUCCESS
end

function slurm_bb_get_status(uid, gid, job_id)
   local id, site = nil, nil
   if job_id and string.match(job_id, "^%d+$") then id, site = committed(job_id) end
   if not id then return slurm.SUCCESS, "no inputs are held for the job\n" end
   return slurm.SUCCESS, "inputs are held at " .. site .. " by hint " .. id .. "\n"
end
